"""The hooks on the model, which are copied, pickled and compiled with it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.utils._pytree import tree_leaves

from natgrad.capture import compiled
from natgrad.capture.sources import Source
from natgrad.errors import NatgradWarning
from natgrad.layers import Handle, Layer, remove_all

if TYPE_CHECKING:
    from natgrad.capture.capture import Capture

# The batch size outside of a forward pass.
NO_BATCH = torch.tensor(-1, device="cpu")
# The number of dimensions of an image.
_IMAGE = 3


@dataclass(frozen=True)
class Samples:
    """The number of samples in a call.

    Attributes:
        number: The number. -1: unknown.
        choices: The possible numbers if the arguments are ambiguous; otherwise empty.
        shapes: The shapes of the tensors in the ambiguous list.
    """

    number: int
    choices: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()


def count_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Samples:
    """Return the number of samples in the arguments of a model.

    It is the first dimension of the first tensor, also inside tuples and dicts. Tensors with one number, such as the
    time of a diffusion model, are skipped if there are others. A list of tensors has either one tensor for each sample,
    as in torchvision's detection models, or several inputs of one batch. It has samples if there is a list of equally
    many dicts (the targets), and inputs if a tensor has four or more dimensions. Otherwise the number is ambiguous.
    """
    listed = _first_list((args, dict(kwargs)))
    if listed is not None:
        return _count_list(listed, (*args, *kwargs.values()))
    leaves = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor) and leaf.ndim > 0]
    tensors = [leaf for leaf in leaves if leaf.ndim > 1 or leaf.shape[0] != 1] or leaves
    return Samples(tensors[0].shape[0] if tensors else -1)


def _count_list(tensors: list[Tensor], arguments: tuple[Any, ...]) -> Samples:
    """Return the number of samples in a list of tensors among the arguments."""
    length, batches = len(tensors), {tensor.shape[0] for tensor in tensors}
    for value in arguments:
        if isinstance(value, list) and len(value) == length and all(isinstance(target, dict) for target in value):
            return Samples(length)
    batch = batches.pop() if len(batches) == 1 else None
    if batch == length or (batch is not None and any(tensor.ndim > _IMAGE for tensor in tensors)):
        return Samples(batch)
    choices = (length,) if batch is None else (length, batch)
    return Samples(-1, choices, tuple(tuple(tensor.shape) for tensor in tensors))


def _first_list(value: Any) -> list[Tensor] | None:
    """Return the first container of tensors in `value`, if it is a list of tensors only."""
    if isinstance(value, list) and value and all(isinstance(item, Tensor) and item.ndim > 0 for item in value):
        return value
    children = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    for child in children:
        if any(isinstance(leaf, Tensor) and leaf.ndim > 0 for leaf in tree_leaves(child)):
            return _first_list(child)
    return None


class ForwardPass:
    """One forward pass of the model.

    Attributes:
        first: The first backward pass through it.
        batch: The batch size of the model's input. -1: none.
        open: The possible batch sizes, while the batch size is ambiguous.
    """

    def __init__(self) -> None:
        """Initialize without uses of layers."""
        self.first: int | None = None
        self.batch = -1
        self.open: Samples | None = None
        self._rows: dict[str, int] = {}
        self._lengths: set[int] = set()

    def note(self, layer: str, rows: int) -> None:
        """Record the rows of one use of a layer."""
        self._rows[layer] = self._rows.get(layer, 0) + rows
        self._lengths.add(rows)

    def positions(self, layer: str, rows: int) -> int:
        """Return the positions of a layer, where `rows` are those of one of its uses.

        If another layer has the rows of all these uses in one use, the uses are pieces (of the tokens before a head).
        """
        whole = self._rows.get(layer, 0)
        return whole if whole in self._lengths else rows


class ForwardPasses:
    """The forward passes of a model, which determine the numbers of samples and positions.

    Attributes:
        batch: The batch size of the last pass, -1 if its input has none. A tensor, because Dynamo would recompile for
            every new number.
        current: The pass in progress.
        began: Whether a pass with gradients has begun since `reset`.
        samples: The samples of such passes, except compiled ones.
        was_open: Whether the batch size of such a pass was ambiguous.
    """

    def __init__(self, capture: Capture) -> None:
        """Initialize without passes; `capture` receives the uses of layers and is held weakly."""
        self._capture = weakref.ref(capture)
        self.batch = NO_BATCH
        self.current: ForwardPass | None = None
        self._sources: dict[int, Source] = {}  # of the pass in progress, by the ``id`` of the tensor
        self.reset()

    def reset(self) -> None:
        """Reset the counts."""
        self.began, self.samples, self.was_open = False, 0, False

    @property
    def capture(self) -> Capture | None:
        """The receiver of the uses of layers. None: it was deleted."""
        return self._capture()

    def enter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin a pass. Its batch size is that of the arguments of the model (`count_samples`)."""
        found = count_samples(args, kwargs)
        self.batch = torch.tensor(found.number, device="cpu")
        self.current = ForwardPass()
        if torch.is_grad_enabled():
            self.began = True
            if torch.compiler.is_compiling():
                return
            self.current.open = found if found.choices else None
            self.was_open = self.was_open or bool(found.choices)
            self.current.batch = found.number
            self.samples += max(0, found.number)

    def settle(self, seen: int) -> None:
        """Set an ambiguous batch size to that of a layer's input, if it is one of the possible ones."""
        current = self.current
        if current is not None and current.open is not None and seen in current.open.choices:
            current.open, current.batch = None, seen
            self.batch = torch.tensor(seen, device="cpu")
            self.samples += seen

    def source(self, tensor: Tensor) -> Source | None:
        """Return what the layers that read `tensor` in the pass in progress share. None: no pass is in progress."""
        if self.current is None or tensor.is_inference():  # the latter have no version
            return None
        source = self._sources.get(id(tensor))
        if source is None or not source.is_of(tensor):
            source = self._sources[id(tensor)] = Source(tensor)
        source.readers += 1
        return source

    def leave(self) -> None:
        """End the pass. Layers called outside of the model do not belong to it."""
        self.current = None
        self._sources.clear()


class Hooks:
    """The hooks on a model, which report to a capture.

    Attributes:
        forward: The passes of the capture.
        on_outputs: Called with the outputs of the model in each pass with gradients, except compiled ones.
    """

    def __init__(self, forward: ForwardPasses) -> None:
        """Initialize without hooks. Later ones are removed when the capture of `forward` is deleted."""
        self.forward = forward
        self.on_outputs: Callable[[Any], None] | None = None
        self._handles: list[Handle] = []
        weakref.finalize(forward.capture, remove_all, self._handles).atexit = False

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

    def on_bucket_reduced(self, bucket: GradBucket) -> None:
        """Report that DDP has reduced a bucket of gradients."""
        capture = self.forward.capture
        if capture is not None:
            capture.on_bucket_reduced(bucket)


class _Hook:
    """A hook on a module.

    Attributes:
        hooks: The hooks that it belongs to. None in copies, which do not report.
    """

    def __init__(self, hooks: Hooks | None = None) -> None:
        """Report to the capture of `hooks`."""
        self.hooks = hooks

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a hook that does not report."""
        return (type(self), ())


class BeginHook(_Hook):
    """Reports the beginning of the model's forward."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report the beginning, as a forward pre-hook."""
        if self.hooks is not None:
            self.hooks.forward.enter(args, kwargs)


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

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Report a use, as a forward hook."""
        self.observe(args[0] if args else kwargs["input" if "input" in kwargs else "x"], output)
        if self.hooks is None or not torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return None
        # F.linear returns a view if samples have positions, and an in-place operation would drop its hook. Without such
        # an operation the compiler removes the copy.
        return output.clone() if isinstance(module, nn.Linear) and output.ndim > 2 else None

    def observe(self, inputs: Tensor, output: Tensor) -> None:
        """Register for the gradient of a layer's output; in compiled code by an operator of the graph."""
        if self.hooks is None:
            return
        forward = self.hooks.forward
        if torch.compiler.is_compiling():
            if output.requires_grad and not torch.compiler.is_exporting():
                batch = NO_BATCH if forward.current is None else forward.batch
                compiled.on_gradient(output, inputs, self._number, batch)
            return
        if forward.capture is not None:
            forward.capture.take_call(self._layer, self._index, inputs, output)

    def receive(self, inputs: Tensor, gradient: Tensor, batch: Tensor) -> None:
        """Take the inputs and output gradients of a layer from a compiled backward pass."""
        capture = None if self.hooks is None else self.hooks.forward.capture
        if capture is not None:
            capture.take_compiled_gradient(self._layer, self._index, inputs, gradient, batch)


def warn_of_others(modules: Iterable[nn.Module]) -> None:
    """Warn if hooks of several preconditioners are on any of these modules."""
    for module in modules:
        found = {
            id(hook.hooks) for hook in module._forward_hooks.values() if isinstance(hook, LayerHook) and hook.hooks
        }
        if len(found) > 1:
            warnings.warn(
                "natgrad: another Preconditioner of this model exists, and both precondition its gradients; "
                "call detach() on one of them",
                NatgradWarning,
                stacklevel=6,  # the caller of `step`
            )
            return
