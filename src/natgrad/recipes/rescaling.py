"""Weights of a fixed norm."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from natgrad.distributed.fsdp import local, shard_group
from natgrad.errors import require
from natgrad.linalg.precision import at_least_float32
from natgrad.recipes.weights import output_channels, trained

if TYPE_CHECKING:
    from collections.abc import Sequence

EPSILON = 1e-9


class WeightRescaling:
    """``w ← √(2 d_out) w / (‖w‖ + 1e-9)`` for each linear and convolutional weight (Osawa 2019, section 4.5, eq. 20).

    ‖w‖ is the Frobenius norm of the tensor, d_out the number of outputs or output channels. Biases, norm layers and
    embeddings are not rescaled, except weights tied with a linear layer.
    """

    def __init__(self, model: nn.Module) -> None:
        """Prepare for a model, plain, wrapped, or sharded by FSDP2; its weights are looked up at each step.

        Raises:
            ValueError: if `model` is not a module.
        """
        require(isinstance(model, nn.Module), "model", type(model).__name__, "an nn.Module")
        self._model = model

    @torch.no_grad()
    def step(self) -> None:
        """Rescale the weights; call it after the optimizer's step. With FSDP2 it all-reduces one number per weight.

        Raises:
            ValueError: if a weight is sharded in another way than by ``fully_shard``; weights are then unchanged.
        """
        weights, targets = list[nn.Parameter](), list[float]()
        for module, name, parameter in trained(self._model):
            channels = output_channels(module)
            if name == "weight" and channels is not None:
                weights.append(parameter)
                targets.append(math.sqrt(2 * channels))
        if not weights:
            return
        factors = _norms(weights)
        torch._foreach_add_(factors, EPSILON)
        torch._foreach_reciprocal_(factors)
        torch._foreach_mul_(factors, targets)
        wide: list[tuple[Tensor, Tensor]] = []
        for weight, factor in zip(weights, factors, strict=True):
            shard = local(weight)
            if shard.dtype == at_least_float32(shard.dtype):
                wide.append((shard, factor))
            else:  # a GPU would round the factor to its dtype
                shard.copy_(shard.float().mul_(factor))
        if wide:
            torch._foreach_mul_([shard for shard, _ in wide], [factor for _, factor in wide])


def _norms(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the Frobenius norms of the unsharded weights, in at least float32."""
    groups: dict[Any, list[int]] = {}
    for index, weight in enumerate(weights):
        group = shard_group(f"weight {index}", weight)
        if group is not None:
            groups.setdefault((group, weight.device), []).append(index)
    dtype = max((at_least_float32(weight.dtype) for weight in weights), key=lambda dtype: dtype.itemsize)
    norms = list(torch._foreach_norm([local(weight) for weight in weights], dtype=dtype))
    for (group, _), indices in groups.items():
        squares = torch.stack([norms[index] for index in indices]).square_()
        dist.all_reduce(squares, group=group)
        for index, norm in zip(indices, squares.sqrt_().unbind(), strict=True):
            norms[index] = norm
    return norms
