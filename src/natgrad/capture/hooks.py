"""The hooks on the model, which are copied, pickled and compiled with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from natgrad.capture import compiled
from natgrad.capture.forward import NO_BATCH, ForwardPasses
from natgrad.layers import Handle, Layer, first_argument, remove_all


class Receiver(Protocol):
    """What the hooks report to."""

    def observes(self, name: str) -> bool:
        """Return whether this step needs the uses of a layer."""

    def take_call(self, name: str, index: int, inputs: Tensor, output: Tensor) -> None:
        """Take one use of a layer, or of the one tied to it at `index`."""

    def take_compiled_gradient(self, name: str, index: int, inputs: Tensor, gradient: Tensor, batch: Tensor) -> None:
        """Take the inputs and the output gradient of a use of a layer in a compiled graph."""


class Hooks:
    """The hooks on a model, which report to a receiver.

    Attributes:
        forward: The forward passes, which the hooks begin and end.
        receiver: Returns the receiver, which is held weakly; None: it was deleted.
        on_outputs: Called with the outputs of the model in each pass with gradients, except compiled ones.
    """

    def __init__(self, forward: ForwardPasses, receiver: Receiver) -> None:
        """Initialize without hooks. Later ones are removed when the receiver is deleted."""
        self.forward, self.receiver = forward, weakref.ref(receiver)
        self.on_outputs: Callable[[Any], None] | None = None
        self._before_forward: weakref.WeakMethod[Callable[[], None]] | None = None
        self._handles: list[Handle] = []
        weakref.finalize(receiver, remove_all, self._handles).atexit = False

    def call_before_forward(self, method: Callable[[], None]) -> None:
        """Call a method before each pass, except compiled ones. Its object is held weakly."""
        self._before_forward = weakref.WeakMethod(method)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a forward pass."""
        if not torch.compiler.is_compiling() and self._before_forward is not None:
            method = self._before_forward()
            if method is not None:
                method()
        self.forward.enter(args, kwargs)

    def attach(self, root: nn.Module, layers: Iterable[Layer]) -> None:
        """Register hooks on a model and some of its layers, in place of earlier ones."""
        remove_all(self._handles)
        self._handles.append(root.register_forward_pre_hook(BeginHook(self), with_kwargs=True))
        for layer in layers:
            for index, module in enumerate((layer, *layer.others)):
                self._handles += module.observe_calls(LayerHook(self, layer.name, index))
        # Registered last, so that it runs after the layer's hook if the model itself is a layer.
        self._handles.append(root.register_forward_hook(EndHook(self), always_call=True))
        compiled.forget(root)

    def detach(self, root: nn.Module) -> None:
        """Remove every hook."""
        remove_all(self._handles)
        compiled.forget(root)


class _Hook:
    """A hook on a module.

    Attributes:
        hooks: The hooks that it belongs to. None in copies, which do not report.
    """

    def __init__(self, hooks: Hooks | None = None) -> None:
        self.hooks = hooks

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a hook that does not report."""
        return (type(self), ())


class BeginHook(_Hook):
    """Reports the beginning of the model's forward."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report the beginning, as a forward pre-hook."""
        if self.hooks is not None:
            self.hooks.begin(args, kwargs)


class EndHook(_Hook):
    """Reports the end of the model's forward."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Report the end, as a forward hook."""
        if self.hooks is None:
            return
        self.hooks.forward.leave()
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and self.hooks.on_outputs is not None:
            self.hooks.on_outputs(output)


class LayerHook(_Hook):
    """Reports the uses of one layer."""

    def __init__(self, hooks: Hooks | None = None, layer: str = "", index: int = 0) -> None:
        """Report the uses of the layer `layer`, or of the layer tied to it at `index`."""
        super().__init__(hooks)
        self._layer, self._index = layer, index
        self._number = compiled.register(self)

    @property
    def is_observing(self) -> bool:
        """Whether the receiver takes the uses of the layer in this step; compiled code reports them in every step."""
        if self.hooks is None:
            return False
        if torch.compiler.is_compiling():
            return True
        receiver = self.hooks.receiver()
        return receiver is not None and receiver.observes(self._layer)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Report a use, as a forward hook."""
        if not self.is_observing:
            return None
        self.observe(first_argument(args, kwargs), output)
        if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return None
        # F.linear returns a view if samples have positions, and an in-place operation would drop its hook. Without such
        # an operation the compiler removes the copy.
        return output.clone() if isinstance(module, nn.Linear) and output.ndim > 2 else None

    def observe(self, inputs: Tensor, output: Tensor) -> None:
        """Register for the gradient of a layer's output; in compiled code by an operator of the graph."""
        if self.hooks is None:
            return
        forward, receiver = self.hooks.forward, self.hooks.receiver()
        if torch.compiler.is_compiling():
            if output.requires_grad and not torch.compiler.is_exporting():
                batch = NO_BATCH if forward.current is None else forward.batch
                compiled.on_gradient(output, inputs, self._number, batch)
            return
        if receiver is not None:
            receiver.take_call(self._layer, self._index, inputs, output)

    def receive(self, inputs: Tensor, gradient: Tensor, batch: Tensor) -> None:
        """Take the inputs and output gradients of a layer from a compiled backward pass."""
        receiver = None if self.hooks is None else self.hooks.receiver()
        if receiver is not None:
            receiver.take_compiled_gradient(self._layer, self._index, inputs, gradient, batch)
