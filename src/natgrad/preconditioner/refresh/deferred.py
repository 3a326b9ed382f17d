"""Running averages in parts (`natgrad.Placement.deferred`).

A running average is linear in the sums of the ranks. So until decompositions are due each rank adds its own sums to its
part, and the average is the sum of the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from natgrad.distributed import Communicator
from natgrad.linalg.precision import at_least_float32
from natgrad.state.averages import allocate_averages
from natgrad.state.block_group import BlockGroup
from natgrad.state.tensors import StateTensors

_EVERYTHING = slice(None)


class PartialAverages:
    """Turns the running averages that all ranks hold into parts, and parts into averages.

    Attributes:
        are_parts: Whether they are parts now.
        differ: Whether the parts of the ranks may differ.
    """

    def __init__(self) -> None:
        self.are_parts = self.differ = False

    def split(self, groups: Iterable[BlockGroup], ranks: int) -> None:
        """Make the averages equal parts."""
        if not self.are_parts:
            for averages, name in _deferred(groups):
                averages.write(name, _EVERYTHING, averages.read(name, _EVERYTHING) / ranks)
        self.are_parts = True

    def join(self, groups: Iterable[BlockGroup], runtime: Communicator, wire: torch.dtype | None) -> None:
        """Sum the parts over the ranks, sent in the dtype `wire` if it is narrower; collective."""
        if not self.are_parts:
            return
        self.are_parts = self.differ = False
        places: dict[object, list[tuple[StateTensors, str]]] = {}
        for averages, name in _deferred(groups):
            places.setdefault((averages[name].device, averages[name].dtype), []).append((averages, name))
        for some in places.values():
            parts = [averages.read(name, _EVERYTHING) for averages, name in some]
            message = torch.cat([part.flatten() for part in parts])
            message = message.to(at_least_float32(message.dtype))
            runtime.post_sum(message, "factors", wire, runtime.group).wait()
            sums = message.split([part.numel() for part in parts])
            for (averages, name), part, summed in zip(some, parts, sums, strict=True):
                averages.write(name, _EVERYTHING, summed.view_as(part))


def _deferred(groups: Iterable[BlockGroup]) -> Iterator[tuple[StateTensors, str]]:
    for group in groups:
        if group.role.assignment.sums == "later":
            allocate_averages(group)
            yield from ((group.state.averages, name) for name in group.state.averages)
