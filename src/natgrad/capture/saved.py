"""A tensor that is kept from forward to backward in the way that autograd keeps its own there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Saved:
    """A tensor, or what saved-tensor hooks made of it: checkpointing recomputes it, ``save_on_cpu`` moves it away."""

    def __init__(self, tensor: Tensor) -> None:
        """Keep `tensor`, without its graph."""
        self.outline = self._plain = tensor.detach()
        self._anchor: Tensor | None = None
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            self.outline, self._anchor = outline(tensor), _Save.apply(self._plain, _LEAF)
            del self._plain

    def get(self) -> Tensor:
        """Return the tensor."""
        if self._anchor is None:
            return self._plain
        node: Any = self._anchor.grad_fn
        tensor: Tensor = node.saved_tensors[0]
        return tensor


def whole(output: Tensor) -> Tensor:
    """Return what `output` is a view of, if all of it: an operation in place would drop the hooks of the view."""
    base = output._base
    # F.linear returns a view where samples have positions.
    same = base is not None and base.requires_grad and base.numel() == output.numel()
    return base if base is not None and same and base.is_contiguous() and output.is_contiguous() else output


def outline(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, dtype and device that takes no memory; its values mean nothing."""
    return tensor.new_empty(()).expand(tensor.shape)


# What makes the output of `_Save` have a node; nothing is ever differentiated down to it.
_LEAF = torch.zeros((), device="cpu", requires_grad=True)


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, leaf: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None
