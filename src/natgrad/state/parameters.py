"""Parameters, and tensors with their shapes, as the blocks of a group; also if FSDP2 shards them.

Each rank then holds some rows. All rows are gathered on the workers for a second pass over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from natgrad.distributed import Communicator
from natgrad.distributed.fsdp import Holders, collect_rows, is_sharded, put_rows
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


class ParameterRows:
    """The rows of parameters that ranks hold, and their conversion to blocks."""

    def __init__(self, runtime: Communicator) -> None:
        """Initialize with an empty cache."""
        self._runtime, self._holders = runtime, Holders(runtime)

    def held(self, slot: Slot) -> range:
        """Return the rows of a parameter that this rank holds."""
        return self._holders.rows(slot, self._runtime.rank)

    def gather_blocks(
        self, groups: Iterable[tuple[BlockGroup, Sequence[int]]], values: Mapping[int, Tensor], kind: str
    ) -> dict[int, Tensor]:
        """Gather the rows of all ranks on some of them; collective.

        Args:
            groups: Block groups, each with the ranks that receive all of its rows.
            values: The rows of this rank in the dtype of the parameters, by the ``id`` of the slot. Those of a replica
                without a receiving rank are not needed.
            kind: The kind of the bytes in `Communicator.traffic`.

        Returns:
            Blocks ``[N, o, i]`` of the groups that this rank receives, by the ``id`` of the group.
        """
        wanted = [(group, tuple(receivers)) for group, receivers in groups]
        slots = [(slot, receivers) for group, receivers in wanted for slot in slots_of(group)]
        gathered = collect_rows(slots, lambda slot, rows: values[id(slot)], self._runtime, kind)
        found = {}
        for group, receivers in wanted:
            if self._runtime.rank in receivers:
                self._put(gathered, [slot for slot in slots_of(group) if not is_sharded(slot.parameter)], values)
                found[id(group)] = stacked(group, lambda slot: gathered[id(slot.parameter)])
        return found

    def _put(self, found: dict[int, Tensor], slots: Iterable[Slot], values: Mapping[int, Tensor]) -> None:
        for slot in slots:
            put_rows(found, slot, self.held(slot).start, values[id(slot)])
