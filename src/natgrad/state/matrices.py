"""Parameters, and tensors shaped as they are, as the blocks of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from natgrad.layers import Layer, Slot
from natgrad.state.block_group import BlockGroup, LayerBlocks


def stacked(group: BlockGroup, of: Callable[[Slot], Tensor | None]) -> Tensor:
    """Return a tensor for each parameter of a block group as blocks ``[N, o, i]``, in the dtype of solves.

    Args:
        group: The block group.
        of: Returns the tensor with all rows, shaped as the parameter; None counts as zero.
    """
    B = torch.zeros(group.size, group.outputs, group.inputs, dtype=group.work_dtype, device=group.device)
    targets, sources = [], []
    for layer, slot, view in places(group.members, B):
        tensor = of(slot)
        if tensor is not None:
            values, place = layer.align(slot, tensor.detach(), view)
            targets.append(place)
            sources.append(values)
    if targets:
        torch._foreach_copy_(targets, sources)
    return B


def parameters(group: BlockGroup) -> Tensor:
    """Return the parameters of a block group, none of them sharded, as blocks ``[N, o, i]``."""
    return stacked(group, lambda slot: slot.parameter)


def places(members: list[LayerBlocks], stacked: Tensor) -> Iterator[tuple[Layer, Slot, Tensor]]:
    """Yield each parameter of some layers with its columns of their blocks."""
    start = 0
    for member in members:
        stop = start + member.stop - member.start
        for slot in member.layer.slots:
            yield member.layer, slot, stacked[start:stop, :, slot.columns]
        start = stop
