"""The hooks on the model. They are copied, pickled and compiled with it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from natgrad.capture import compiled
from natgrad.capture.samples import Samples, count_samples
from natgrad.errors import NatgradWarning
from natgrad.layers import Handle, Layer, remove_all

# The batch size if there is none.
NO_BATCH = torch.tensor(-1, device="cpu")


class Watcher(Protocol):
    """Receives the passes of a model: `natgrad.capture.Capture`."""

    def watch(self, name: str, index: int, inputs: Tensor, output: Tensor) -> None:
        """Take one use of a layer."""

    def receive(self, name: str, index: int, inputs: Tensor, gradient: Tensor, batch: Tensor) -> None:
        """Take the gradient of one use of a layer in a compiled graph."""

    def reduced(self, bucket: GradBucket) -> None:
        """Take notice that DDP has reduced a bucket of gradients."""


class Pass:
    """One forward pass of the model.

    Attributes:
        first: The backward pass that first differentiated it.
        batch: The batch size of the model's input. -1: none.
        open: The arguments of the model, while they leave the batch size open.
    """

    def __init__(self, batch: int = -1) -> None:
        """Start before the first layer."""
        self.first: int | None = None
        self.batch = batch
        self.open: Samples | None = None
        self._rows: dict[str, int] = {}
        self._lengths: set[int] = set()

    def note(self, layer: str, rows: int) -> None:
        """Record the rows of one use of a layer."""
        self._rows[layer] = self._rows.get(layer, 0) + rows
        self._lengths.add(rows)

    def positions(self, layer: str, rows: int) -> int:
        """Return the positions of a layer, given the `rows` of one of its uses.

        If another layer saw the rows of all these uses at once, the uses were pieces (of the tokens before a head).
        """
        whole = self._rows.get(layer, 0)
        return whole if whole in self._lengths else rows


class Script(Protocol):
    """Is notified of forward passes with gradients."""

    def enter(self, forward: Pass) -> None:
        """Note that a pass begins."""


class Forward:
    """The forward passes of a model, which determine samples and positions of every layer's rows.

    Attributes:
        batch: The batch size of the last pass, -1 if its input has none. A tensor, because Dynamo would recompile for
            every new number.
        current: The pass in progress.
        began: Whether a pass with gradients has begun since `reset`.
        samples: The samples of such passes, without compiled ones.
        was_open: Whether the batch size of such a pass was open.
        script: Is notified of passes with gradients. None: nothing is.
    """

    def __init__(self, watcher: Watcher | None = None, script: Script | None = None) -> None:
        """Start before the first pass.

        Args:
            watcher: Receives the uses of layers, held weakly. None: nothing does.
            script: Is notified of passes with gradients.
        """
        self._watcher = None if watcher is None else weakref.ref(watcher)
        self.batch = NO_BATCH
        self.current: Pass | None = None
        self.script = script
        self.reset()

    def reset(self) -> None:
        """Forget the passes so far."""
        self.began, self.samples, self.was_open = False, 0, False

    @property
    def watcher(self) -> Watcher | None:
        """The receiver of the uses of layers, while it lives."""
        return None if self._watcher is None else self._watcher()

    def enter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin a pass. Its batch size is that of the arguments of the model (`count_samples`)."""
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
        """Set the batch size of the present pass to that of a layer's input, if it is open and may be equal."""
        if self.current is not None and self.current.open is not None and seen in self.current.open.choices:
            self.current.open = None
            self.batch = torch.tensor(seen, device="cpu")
            self.samples += seen
            self.current.batch = seen

    def leave(self) -> None:
        """End the pass, so that a layer called by itself is not taken to belong to it."""
        self.current = None


class Hooks:
    """The hooks on a model, which report to one watcher at a time.

    Attributes:
        forward: The passes of the present watcher.
    """

    def __init__(self, forward: Forward) -> None:
        """Start without hooks. They are removed when the watcher of `forward` is deleted."""
        self.forward = forward
        self._handles: list[Handle] = []
        weakref.finalize(forward.watcher, remove_all, self._handles).atexit = False

    def attach(self, root: nn.Module, layers: Iterable[Layer]) -> None:
        """Set hooks on a model and some of its layers, instead of earlier ones."""
        remove_all(self._handles)
        self._handles.append(root.register_forward_pre_hook(BeginHook(self), with_kwargs=True))
        for layer in layers:
            for index, module in enumerate((layer, *layer.others)):
                self._handles += module.tap(LayerHook(self, layer.name, index))
        # Set last: if the model itself is a layer, its forward ends after the layer's.
        self._handles.append(root.register_forward_hook(EndHook(self), always_call=True))
        compiled.forget(root)

    def detach(self, root: nn.Module) -> None:
        """Remove every hook."""
        remove_all(self._handles)
        compiled.forget(root)

    @contextmanager
    def reporting_to(self, forward: Forward) -> Iterator[None]:
        """Report to another watcher within the context, or to none, instead of the present one."""
        present, self.forward = self.forward, forward
        try:
            yield
        finally:
            self.forward = present

    def reduced(self, bucket: GradBucket) -> None:
        """Report that DDP has reduced a bucket of gradients."""
        watcher = self.forward.watcher
        if watcher is not None:
            watcher.reduced(bucket)


class BeginHook:
    """Reports the beginning of the model's forward."""

    def __init__(self, hooks: Hooks | None = None) -> None:
        """Report to the watcher of `hooks`; None: to none."""
        self._hooks = hooks

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report the beginning, as a forward pre-hook."""
        if self._hooks is not None:
            self._hooks.forward.enter(args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle with the model as one that reports to none."""
        return (type(self), ())


class EndHook(BeginHook):
    """Reports the end of the model's forward."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Be a forward hook."""
        if self._hooks is not None:
            self._hooks.forward.leave()


class LayerHook:
    """Reports the uses of one layer.

    Attributes:
        hooks: The hooks that it belongs to. None in a copy, which does not report.
    """

    def __init__(self, hooks: Hooks | None = None, layer: str = "", index: int = 0) -> None:
        """Report the uses of the layer `layer`, or of the layer tied to it at `index`."""
        self.hooks = hooks
        self._layer, self._index = layer, index
        self._number = compiled.register(self)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Be a forward hook."""
        self.see(args[0] if args else kwargs["input" if "input" in kwargs else "x"], output)
        if self.hooks is None or not torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return None
        # F.linear returns a view if samples have positions, and an in-place operation would drop its hook. The compiler
        # removes the copy if there is none.
        return output.clone() if isinstance(module, nn.Linear) and output.ndim > 2 else None

    def see(self, inputs: Tensor, output: Tensor) -> None:
        """Register for the gradient of a layer's output, in compiled code by an operation of the graph."""
        if self.hooks is None:
            return
        forward = self.hooks.forward
        if torch.compiler.is_compiling():
            if output.requires_grad and not torch.compiler.is_exporting():
                batch = NO_BATCH if forward.current is None else forward.batch
                compiled.on_gradient(output, inputs, self._number, batch)
            return
        watcher = forward.watcher
        if watcher is not None:
            watcher.watch(self._layer, self._index, inputs, output)

    def receive(self, inputs: Tensor, gradient: Tensor, batch: Tensor) -> None:
        """Take the inputs and output gradients of a layer from a compiled backward pass."""
        watcher = None if self.hooks is None else self.hooks.forward.watcher
        if watcher is not None:
            watcher.receive(self._layer, self._index, inputs, gradient, batch)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle with the model as one that reports to none."""
        return (type(self), ())


def warn_of_others(modules: Iterable[nn.Module]) -> None:
    """Warn if hooks of several preconditioners are on any of these modules."""
    for module in modules:
        found = {
            id(hook.hooks) for hook in module._forward_hooks.values() if isinstance(hook, LayerHook) and hook.hooks
        }
        if len(found) > 1:
            warnings.warn(
                "natgrad: another Preconditioner of this model is alive, and both precondition its gradients; "
                "detach() the one that is not wanted",
                NatgradWarning,
                stacklevel=6,  # the caller of `step`
            )
            return
