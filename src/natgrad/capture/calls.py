"""The calls of layers from the forward pass to the gradient of the output, and their rows pooled over positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.capture.forward import ForwardPass
from natgrad.curvature import Curvature
from natgrad.layers import Layer
from natgrad.layers.rows import DenseRows, Rows, SharedInput


class Saved:
    """A tensor saved through autograd's saved-tensor hooks, which may recompute it (checkpoints) or offload it."""

    def __init__(self, tensor: Tensor, source: SharedInput | None = None) -> None:
        """Keep `tensor`, without its graph; `source` if several layers read it."""
        self.source = source
        self.outline = self._plain = tensor.detach()
        self._anchor: Tensor | None = None
        if _saved_tensor_hooks_act():
            self.outline, self._anchor = outline(tensor), _Save.apply(self._plain, _LEAF)
            del self._plain

    def get(self) -> Tensor:
        """Return the tensor."""
        if self._anchor is None:
            return self._plain
        node: Any = self._anchor.grad_fn
        tensor: Tensor = node.saved_tensors[0]
        return tensor

    def keep(self) -> None:
        """Keep the tensor itself from now on: a checkpoint gives it once."""
        if self._anchor is not None:
            self._plain, self._anchor = self.get(), None


def outline(tensor: Tensor) -> Tensor:
    """Return an uninitialized tensor of the same shape, dtype and device with the memory of one element."""
    return tensor.new_empty(()).expand(tensor.shape)


def _saved_tensor_hooks_act() -> bool:
    """Return whether tensors that autograd saves now pass through hooks. torch 2.6 does not say: they may."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(False) is not None


# An input that requires gradients, so that the output of `_Save` has a node.
_LEAF = torch.zeros((), device="cpu", requires_grad=True)


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, leaf: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


@dataclass(eq=False)
class LayerCall:
    """One use of a layer.

    Attributes:
        primary: The layer that `layer` is tied to, or `layer` itself. Its statistics include this use.
        inputs: The layer's inputs. None: they have been used, or are not needed.
        outline: A tensor with the shape of the inputs.
        batch: The batch size of the model's input. -1: unknown.
        forward: The forward pass of the model that the use belongs to, if known.
        edge: The number of the node of its output in the autograd graph, and of the output there, if needed.
        traced: Whether the use is part of a compiled graph, which reports it only with its gradient.
    """

    primary: Layer
    layer: Layer
    curvature: Curvature
    inputs: Saved | None
    outline: Tensor
    batch: int
    forward: ForwardPass | None
    traced: bool = False
    edge: tuple[int, int] | None = None

    def first_task(self, task: int) -> int:
        """Return the first backward pass through the same forward pass, whose later ones add further losses."""
        if self.forward is None:
            return task
        if self.forward.first is None:
            self.forward.first = task
        return self.forward.first


class Pooled:
    """The rows of all uses of a layer in one backward pass, summed over positions and uses (sharing by *reduce*).

    `inputs` is the sum of a ``[n, B, i]``, `gradients` that of g ``[n, B, o]``.
    """

    def __init__(self, task: int, inputs: Rows, gradients: Rows, scale: float, dtype: torch.dtype) -> None:
        """Pool the rows of the first use, in `dtype`."""
        self.task, self.scale = task, scale
        self._one_hot, self._positions = inputs.one_hot, inputs.positions
        self.inputs, self.gradients = inputs.pool().to(dtype), gradients.pool().to(dtype)

    def add(self, inputs: Rows, gradients: Rows) -> None:
        """Add the rows of another use."""
        self.inputs = self.inputs + inputs.pool().to(self.inputs.dtype)
        self.gradients = self.gradients + gradients.pool().to(self.gradients.dtype)
        self._positions += inputs.positions

    def rows(self) -> tuple[DenseRows, DenseRows]:
        """Return the mean of a over positions, in new memory, and the sum of g."""
        inputs = DenseRows((self.inputs / self._positions)[:, :, None], one_hot=self._one_hot)
        return inputs, DenseRows(self.gradients[:, :, None])
