"""The hooks: what a layer's forward saw is kept until its output's gradient arrives, then reduced to sums.

Only gradient hooks commit. A forward pass that is never differentiated leaves no trace, and nothing is kept once the
gradient has come: activations are never hoarded.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from natgrad.blocks import Stack
from natgrad.curvature import Curvature
from natgrad.errors import NatgradError
from natgrad.layers import Handle, Layer, Rows
from natgrad.layers.rows import DenseRows
from natgrad.sums import Sums
from natgrad.upstream import sources


@dataclass
class _Use:
    """One use of a layer, from its forward to its gradient; what it shows counts as that of `primary`."""

    primary: Layer
    layer: Layer
    curvature: Curvature
    inputs: Tensor | None
    batch: int | None
    outer_task: int
    sampled: bool = False


@dataclass
class _Pooled:
    """The pooled rows of all uses of a layer in one backward pass (sharing by *reduce*)."""

    task: int
    inputs: Tensor
    gradients: Tensor
    positions: int
    scale: float


class Capture:
    """Everything that the hooks of one preconditioner share.

    Attributes:
        wanted: Whether the coming step needs statistics.
        sampling: Whether the backward pass under way differentiates a loss of sampled labels.
        sums: The raw sums.
        backwards: The samples seen by each backward pass of the loss since the last step.
        seconds: Host seconds spent in the gradient hooks.
    """

    def __init__(self, root: nn.Module, *, reduction: Literal["mean", "tokens", "sum"], counting: bool) -> None:
        """Prepare; no hook is set before `attach`."""
        self._reduction, self._counting = reduction, counting
        self._root = root
        self._handles: list[Handle] = []
        self._batch: int | None = None
        self._inside = False  # the model's own forward
        self._layers: dict[str, tuple[Layer, Curvature]] = {}
        self._pooled: dict[str, _Pooled] = {}
        self._unsampled: list[tuple[GradientEdge, _Use]] = []
        self.wanted = True
        self.sampling = False
        self.sums = Sums([], fused=False)
        self.backwards: dict[int, int] = {}
        self.seconds = 0.0

    def attach(self, stacks: list[Stack], *, fused: bool) -> None:
        """Set the hooks on the layers of `stacks`, in place of those set before; `fused` is that of `Sums`."""
        self.detach()
        self.sums = Sums(stacks, fused=fused)
        self._handles.append(self._root.register_forward_pre_hook(_RootTap(self), with_kwargs=True))
        for stack in stacks:
            for member in stack.members:
                self._layers[member.layer.name] = (member.layer, stack.curvature)
                for index, layer in enumerate((member.layer, *member.layer.others)):
                    self._handles += layer.tap(_LayerTap(self, member.layer.name, index))
        # Set last: where the model is itself a layer, its forward ends after that layer's.
        self._handles.append(self._root.register_forward_hook(_EndTap(self)))

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._layers.clear()
        self._pooled.clear()
        self._unsampled.clear()

    @property
    def samples(self) -> int:
        """The samples (token losses: positions) of this rank since the last step."""
        return sum(self.backwards.values())

    @property
    def missing_samples(self) -> bool:
        """Whether statistics are due from sampled labels, and the loss was differentiated without them."""
        sampled = [name for name, (_, curvature) in self._layers.items() if curvature.likelihood is not None]
        unseen = not any(self.sums.tallies[name].rows for name in sampled)
        return self.wanted and bool(sampled) and bool(self.backwards) and unseen

    def sampled_pass(self, outputs: Tensor, score: Tensor) -> None:
        """Differentiate the loss of sampled labels down to the layers' outputs; parameters' ``.grad`` stay untouched.

        Args:
            outputs: What the model returned.
            score: The derivative of that loss by `outputs`.
        """
        if not self._unsampled:
            return
        ends = sources([edge for edge, _ in self._unsampled])
        self.sampling = True
        try:
            torch.autograd.grad(outputs, ends, score.to(outputs.dtype), retain_graph=True, allow_unused=True)
        finally:
            self.sampling = False
        # What these outputs do not depend on belongs to another forward pass, whose backward is still to come.
        self._unsampled = [(edge, use) for edge, use in self._unsampled if not use.sampled]

    def finish(self) -> None:
        """Complete the sums of the step."""
        for name in list(self._pooled):
            self._flush(name)

    def reset(self, *, wanted: bool) -> None:
        """Begin the next step."""
        self.wanted = wanted
        self._unsampled.clear()
        self.discard()

    def discard(self) -> None:
        """Forget what backward passes have shown; forward passes may still be differentiated."""
        self._pooled.clear()
        self.backwards.clear()
        self.sums.reset()

    def enter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the batch size of the model's own input, in whose terms every layer's rows are samples x positions."""
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim > 0)
        first = next(tensors, None)
        self._batch = None if first is None else first.shape[0]
        self._inside = True

    def leave(self) -> None:
        """Note that the model's own forward is over: a layer called by itself says nothing of an earlier batch."""
        self._inside = False

    def watch(self, name: str, index: int, inputs: Tensor, output: Tensor) -> None:
        """Keep the inputs of one use of a layer, or of the one tied to it, until the gradient of its output comes."""
        if not (self.wanted or self._counting) or not torch.is_grad_enabled() or not output.requires_grad:
            return
        primary, curvature = self._layers[name]
        layer = (primary, *primary.others)[index]
        outer_task = torch._C._current_graph_task_id()  # that of a backward pass that recomputes checkpoints
        batch = self._batch if self._inside or outer_task != -1 else None
        use = _Use(primary, layer, curvature, inputs.detach(), batch, outer_task)
        output.register_hook(lambda gradient: self._gradient(use, gradient))
        if self.wanted and curvature.likelihood is not None:
            self._unsampled.append((get_gradient_edge(output), use))

    def _gradient(self, use: _Use, gradient: Tensor) -> None:
        # Gradients with a graph of their own are derivatives inside the model (as in physics), not the loss's.
        if torch.is_grad_enabled() or use.inputs is None:
            return
        task = use.outer_task if use.outer_task != -1 else torch._C._current_graph_task_id()
        if not self.sampling and task not in self.backwards and not _reaches_parameters(use.layer):
            return  # a pass down to the model's inputs, as attacks and saliency maps make, is none of the loss
        if use.outer_task != -1 and use.curvature.likelihood is not None:
            raise NatgradError("fisher='sampled' needs checkpoint(..., use_reentrant=False)")
        started = perf_counter()
        inputs = use.inputs
        if not self.sampling:
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                use.inputs = None
            self._count_backward(use, task, inputs, gradient)
        use.sampled = use.sampled or self.sampling
        current = self._layers.get(use.primary.name) == (
            use.primary,
            use.curvature,
        )  # the coverage may have changed since
        if self.wanted and current and self.sampling == (use.curvature.likelihood is not None):
            self._observe(use, task, inputs, gradient)
        self.seconds += perf_counter() - started

    def _count_backward(self, use: _Use, task: int, inputs: Tensor, gradient: Tensor) -> None:
        # The mean that the loss took is over the model's samples, of which this layer may have seen a part.
        whole = self._reduction != "tokens" and use.layer.batched(inputs) and use.batch
        samples = whole or self._samples(use, inputs, gradient)
        self.backwards[task] = max(samples, self.backwards.get(task, 0))

    def _samples(self, use: _Use, inputs: Tensor, gradient: Tensor) -> int:
        if self._reduction == "tokens":
            return use.layer.positions(gradient)
        # A layer that sees windows or frames of a sample as a longer batch still sees the model's samples.
        own = use.layer.samples(inputs)
        return use.batch if use.batch and own % use.batch == 0 else own

    def _observe(self, use: _Use, task: int, inputs: Tensor, gradient: Tensor) -> None:
        layer, curvature, name = use.layer, use.curvature, use.primary.name
        samples = self._samples(use, inputs, gradient)
        if samples == 0:
            return
        gradients = layer.gradient_rows(gradient, samples)
        rows: Rows = layer.input_rows(inputs, gradient, samples)
        if self._reduction == "tokens":
            counted = gradients.nonzero()
            if counted.device.type != "cpu" or not bool(counted.all()):
                rows = rows.masked(counted)
        scale = 1.0 if self.sampling or self._reduction == "sum" else float(self.backwards[task])
        if curvature.pools:
            self._pool(use, task, rows, gradients, samples, scale)
            return
        tally = self.sums.tallies[name]
        sums = self.sums.of(name)
        curvature.observe(sums, rows, gradients, scale=scale, first=tally.rows == 0)
        tally.count(task, samples, layer.positions(gradient))

    def _pool(self, use: _Use, task: int, inputs: Rows, gradients: Rows, samples: int, scale: float) -> None:
        name = use.primary.name
        before = self._pooled.get(name)
        if before and (before.task, before.inputs.shape[1]) != (task, samples):
            self._flush(name)
        dtype = next(iter(self.sums.of(name).values())).dtype
        a, g = (rows.pool().to(dtype).unflatten(1, (samples, -1)).sum(2) for rows in (inputs, gradients))
        positions = inputs.samples * inputs.positions // samples
        if name not in self._pooled:
            self._pooled[name] = _Pooled(task, a, g, positions, scale)
            return
        pooled = self._pooled[name]
        pooled.inputs, pooled.gradients = pooled.inputs + a, pooled.gradients + g
        pooled.positions += positions

    def _flush(self, name: str) -> None:
        pooled = self._pooled.pop(name)
        _, curvature = self._layers[name]
        tally = self.sums.tallies[name]
        inputs = DenseRows((pooled.inputs / pooled.positions)[:, :, None])
        gradients = DenseRows(pooled.gradients[:, :, None])
        curvature.observe(self.sums.of(name), inputs, gradients, scale=pooled.scale, first=tally.rows == 0)
        tally.count(pooled.task, inputs.samples, inputs.samples)


def _reaches_parameters(layer: Layer) -> bool:
    """Tell whether the backward pass under way goes down to the parameters of `layer`."""
    parameter = layer.slots[0].parameter
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # asked for by name in torch.autograd.grad, or frozen meanwhile
        return True


class _Tap:
    """A hook that copies and pickles with its model as one that does nothing."""

    def __init__(self, capture: Capture | None = None, layer: str = "", index: int = 0) -> None:
        self._capture = weakref.ref(capture) if capture is not None else lambda: None
        self._layer, self._index = layer, index

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


class _RootTap(_Tap):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        capture = self._capture()
        if capture is not None:
            capture.enter(args, kwargs)


class _EndTap(_Tap):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        capture = self._capture()
        if capture is not None:
            capture.leave()


class _LayerTap(_Tap):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.see(args[0] if args else kwargs["input"], output)

    def see(self, inputs: Tensor, output: Tensor) -> None:
        capture = self._capture()
        if capture is not None:
            capture.watch(self._layer, self._index, inputs, output)
