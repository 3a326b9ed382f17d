"""Parameters, and tensors with their shapes, as the blocks of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from natgrad.distributed.fsdp import is_sharded
from natgrad.layers import Layer, Slot
from natgrad.state.block_group import BlockGroup, LayerBlocks


def slots_of(group: BlockGroup) -> Sequence[Slot]:
    """Return the parameters of a block group, or the parts of them that belong to it."""
    return [slot for member in group.members for slot in member.layer.slots]


def has_shards(group: BlockGroup) -> bool:
    """Return whether any parameter of a group is sharded."""
    return any(is_sharded(slot.parameter) for slot in slots_of(group))


def stacked(group: BlockGroup, of: Callable[[Slot], Tensor | None]) -> Tensor:
    """Return tensors with the shapes of a group's parameters as blocks ``[N, o, i]``, in `BlockGroup.work_dtype`.

    Args:
        group: The block group.
        of: Returns the unsharded tensor of a parameter; None counts as zero.
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


def places(members: list[LayerBlocks], stacked: Tensor) -> Iterator[tuple[Layer, Slot, Tensor]]:
    """Yield each parameter of some layers with its columns ``[n, o, ...]`` of their blocks `stacked`."""
    start = 0
    for member in members:
        stop = start + member.stop - member.start
        for slot in member.layer.slots:
            yield member.layer, slot, stacked[start:stop, :, slot.columns]
        start = stop
