"""The hooks on the model: what copies and pickles with it, and is traced with it by ``torch.compile``."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from natgrad.capture import compiled
from natgrad.capture.samples import Samples, count_samples
from natgrad.errors import NatgradWarning

# The batch size where there is none.
NO_BATCH = torch.tensor(-1, device="cpu")


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
        batch: The batch size of the model's input; -1: none.
        open: What the model was called with, as long as that leaves the batch size open.
    """

    def __init__(self, batch: int = -1) -> None:
        """Begin before the first layer."""
        self.first: int | None = None
        self.batch = batch
        self.open: Samples | None = None
        self._rows: dict[str, int] = {}
        self._lengths: set[int] = set()

    def note(self, layer: str, rows: int) -> None:
        """Note the rows of one use of a layer."""
        self._rows[layer] = self._rows.get(layer, 0) + rows
        self._lengths.add(rows)

    def positions(self, layer: str, rows: int) -> int:
        """Return how many positions a layer saw that saw `rows` in one of its uses.

        Where another saw at once what this one saw in all its uses, they were pieces (of the tokens before a head).
        """
        whole = self._rows.get(layer, 0)
        return whole if whole in self._lengths else rows


class Script(Protocol):
    """What follows forward passes with gradients."""

    def enter(self, forward: Pass) -> None:
        """Note that a pass begins."""


class Forward:
    """The model's own forward, in whose terms every layer's rows are samples x positions.

    Attributes:
        batch: The batch size of the last pass, -1 if its input has none. A tensor: Dynamo would compile anew for every
            new number.
        current: The pass that is under way.
        began: Whether a pass with gradients has begun since it was set to False.
        samples: Those of such passes since it was set to 0; of compiled ones none.
        was_open: Whether the batch size of such a pass was open, since it was set to False.
        script: What is told of passes with gradients; None: nobody.
    """

    def __init__(self) -> None:
        """Begin before the first pass."""
        self.batch = NO_BATCH
        self.current: Pass | None = None
        self.began = False
        self.samples = 0
        self.was_open = False
        self.script: Script | None = None

    def enter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin a pass; its batch size is what `count_samples` finds in the arguments of the model."""
        found = count_samples(args, kwargs)
        self.batch = torch.tensor(found.number, device="cpu")
        self.current = Pass()
        if torch.is_grad_enabled():
            self.began = True
            if torch.compiler.is_compiling():
                return
            self.current.open = found if found.choices else None
            self.was_open = self.was_open or bool(found.choices)
            self.current.batch = found.number
            self.samples += max(0, found.number)
            if self.script is not None:
                self.script.enter(self.current)

    def settle(self, seen: int) -> None:
        """Settle the batch size of the pass under way, if it is open and may be what a layer has seen."""
        if self.current is not None and self.current.open is not None and seen in self.current.open.choices:
            self.current.open = None
            self.batch = torch.tensor(seen, device="cpu")
            self.samples += seen
            self.current.batch = seen

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
        self._layer, self._index, self._deaf = layer, index, watcher is None
        self._number = compiled.register(self)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Be a forward hook."""
        self.see(args[0] if args else kwargs["input" if "input" in kwargs else "x"], output)
        if self._deaf or not torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return None
        # F.linear returns a view where samples have positions, and an operation in place would drop its hook. The
        # compiler takes the copy out again where there is none.
        return output.clone() if isinstance(module, nn.Linear) and output.ndim > 2 else None

    def see(self, inputs: Tensor, output: Tensor) -> None:
        """Watch the output of a layer for its gradient; under a compiler by an operation of the graph."""
        if self._deaf:
            return
        if torch.compiler.is_compiling():
            if output.requires_grad and not torch.compiler.is_exporting():
                batch = NO_BATCH if self._forward.current is None else self._forward.batch
                compiled.on_gradient(output, inputs, self._number, batch)
            return
        watcher = self._watcher()
        if watcher is not None:
            watcher.watch(self._layer, self._index, inputs, output)

    def receive(self, inputs: Tensor, gradient: Tensor, batch: Tensor) -> None:
        """Take the inputs and output gradients of a layer from a compiled backward pass."""
        watcher = self._watcher()
        if watcher is not None:
            watcher.receive(self._layer, self._index, inputs, gradient, batch)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle with the model as one that tells nobody."""
        return (type(self), ())

    @property
    def watcher(self) -> Watcher | None:
        """Who is told; None: nobody, or nobody any more."""
        return self._watcher()


def watchers(module: nn.Module) -> list[Watcher]:
    """Return who is told of the uses of `module`, once each."""
    told = [hook.watcher for hook in module._forward_hooks.values() if isinstance(hook, LayerTap)]
    return [watcher for index, watcher in enumerate(told) if watcher is not None and watcher not in told[:index]]


def warn_of_others(modules: Iterable[nn.Module]) -> None:
    """Warn where several look on at any of these; called by what the step itself calls."""
    if any(len(watchers(module)) > 1 for module in modules):
        warnings.warn(
            "natgrad: another Preconditioner of this model is alive, and both precondition its gradients; "
            "detach() the one that is not wanted",
            NatgradWarning,
            stacklevel=6,  # past `_begins`, `step` and its decorator
        )


def _nobody() -> None:
    return None
