"""The hooks on the model: what copies and pickles with it, and is traced with it by ``torch.compile``."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from natgrad import compiled

# The batch size where there is none.
NO_BATCH = torch.tensor(-1)


class Watcher(Protocol):
    """What the hooks of layers report to."""

    def watch(self, name: str, index: int, inputs: Tensor, output: Tensor) -> None:
        """Note one use of a layer."""

    def receive(self, name: str, index: int, inputs: Tensor, gradient: Tensor, batch: Tensor) -> None:
        """Note the gradient of one use of a layer in a compiled graph."""


class Pass:
    """One forward pass of the model.

    Attributes:
        first: The backward pass that differentiated it first.
    """

    first: int | None = None


class Forward:
    """The model's own forward, in whose terms every layer's rows are samples x positions.

    Attributes:
        batch: The batch size of the last pass, -1 if its input has none. A tensor: Dynamo would compile anew for every
            new number.
        current: The pass that is under way.
    """

    def __init__(self) -> None:
        """Begin before the first pass."""
        self.batch = NO_BATCH
        self.current: Pass | None = None

    def enter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin a pass; its batch size is that of the first tensor that the model is called with."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim > 0]
        self.batch = torch.tensor(tensors[0].shape[0] if tensors else -1)
        self.current = Pass()

    def leave(self) -> None:
        """End the pass: a layer called by itself says nothing of an earlier batch."""
        self.current = None


class RootTap:
    """Tells of the beginning of the model's forward."""

    def __init__(self, forward: Forward | None = None) -> None:
        """Tell `forward`."""
        self._forward = Forward() if forward is None else forward

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Be a forward pre-hook."""
        self._forward.enter(args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle with the model as one that tells nobody."""
        return (type(self), ())


class EndTap(RootTap):
    """Tells of the end of the model's forward."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Be a forward hook."""
        self._forward.leave()


class LayerTap:
    """Tells of the uses of one layer."""

    def __init__(
        self, watcher: Watcher | None = None, forward: Forward | None = None, layer: str = "", index: int = 0
    ) -> None:
        """Tell `watcher`, as long as it lives, of the layer called `layer`, or of the one tied to it at `index`."""
        self._watcher = weakref.ref(watcher) if watcher is not None else _nobody
        self._forward = Forward() if forward is None else forward
        self._layer, self._index = layer, index
        self._number = compiled.register(self)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Be a forward hook."""
        self.see(args[0] if args else kwargs["input" if "input" in kwargs else "x"], output)

    def see(self, inputs: Tensor, output: Tensor) -> None:
        """See `natgrad.layers.Tap.see`."""
        if torch.compiler.is_compiling():
            if output.requires_grad and not torch.compiler.is_exporting():
                compiled.on_gradient(output, inputs, self._number, self._forward.batch)
            return
        watcher = self._watcher()
        if watcher is not None:
            watcher.watch(self._layer, self._index, inputs, output)

    def receive(self, inputs: Tensor, gradient: Tensor, batch: Tensor) -> None:
        """See `natgrad.compiled.Receiver`."""
        watcher = self._watcher()
        if watcher is not None:
            watcher.receive(self._layer, self._index, inputs, gradient, batch)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle with the model as one that tells nobody."""
        return (type(self), ())


def _nobody() -> None:
    return None
