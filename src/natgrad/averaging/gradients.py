"""Gradients averaged within a node, where no wrapper does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from natgrad.averaging.nodes import Grid
from natgrad.averaging.vector import MESSAGE_BYTES, Packing
from natgrad.linalg import tensor_on


class NodeGradients:
    """Averages ``.grad`` over the ranks of a node that had a batch, in one fused message for each dtype and device."""

    def __init__(self, grid: Grid, budget: int = MESSAGE_BYTES) -> None:
        """Take no memory yet."""
        self._grid, self._budget = grid, budget
        self._packing = Packing([])
        self._vectors: list[Tensor] = []

    def average_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make ``.grad`` the average over the node: collective in it.

        A rank whose gradients are all None had no batch: it receives the average of the others. A gradient that is
        None on all ranks of the node stays None.

        Args:
            parameters: The trainable ones, the same on every rank.
        """
        runtime = self._grid.inside
        if runtime.ranks == 1 or not parameters:
            return
        used = [parameter.grad is not None for parameter in parameters]
        flags = tensor_on(parameters[0].device, [any(used), *used], torch.float32)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        tensors = [*gradients, flags]
        if not self._packing.fits(tensors):
            self._packing = Packing(tensors, self._budget)
            self._vectors = self._packing.empty()
        self._packing.pack(tensors, self._vectors)
        posted = [runtime.post_sum(v, {"gradients": v.numel()}, None, runtime.group) for v in self._vectors]
        for one in posted:
            one.wait()
        self._packing.unpack(self._vectors, tensors)
        for device in {gradient.device for gradient in gradients}:
            share = flags[0].clamp(min=1).to(device)
            torch._foreach_div_([gradient for gradient in gradients if gradient.device == device], share)
        if not all(used):  # only here, where it is rare, the device is waited for
            for parameter, count in zip(parameters, flags[1:].tolist(), strict=True):
                if not count:
                    parameter.grad = None
