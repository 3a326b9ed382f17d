"""What FSDP2 has sharded: each rank has some rows of the parameters of a layer, and of what is shaped as they are.

Sums over elements are sums over rows. Only for a product with the Fisher block of a layer does one rank, which accounts
for the layer, need all rows, and for its mean outputs each worker. Of several copies of a model (HSDP) that counts in a
sum which has a part on the rank that accounts for the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from natgrad.distributed import Communicator
from natgrad.distributed.fsdp import Holders, Piece, collect_rows, is_sharded
from natgrad.layers import Slot
from natgrad.state.block_group import BlockGroup
from natgrad.state.matrices import assembled


def slots_of(stack: BlockGroup) -> Sequence[Slot]:
    """Return the parameters of a stack, or the parts of them that are its."""
    return [slot for member in stack.members for slot in member.layer.slots]


def has_shards(stack: BlockGroup) -> bool:
    """Return whether any parameter of a stack is sharded."""
    return any(is_sharded(slot.parameter) for slot in slots_of(stack))


class Rows:
    """Which rows of the parameters of some stacks are whose."""

    def __init__(self, runtime: Communicator) -> None:
        """Look nothing up yet."""
        self._runtime, self._holders = runtime, Holders(runtime)

    def held(self, slot: Slot) -> range:
        """Return the rows of a parameter that this rank holds."""
        return self._holders.rows(slot, self._runtime.rank)

    def counts(self, slot: Slot, accountant: int) -> bool:
        """Return whether this rank's rows are of the copy that counts, which an `accountant` has a part of."""
        if not is_sharded(slot.parameter):
            return accountant == self._runtime.rank
        return self._holders.together(slot, accountant, self._runtime.rank)

    def own(self, stack: BlockGroup, values: Mapping[int, Tensor]) -> Tensor:
        """Return what this rank has as blocks ``[N, o, i]``, zero elsewhere.

        Args:
            stack: The stack.
            values: Its rows, by the ``id`` of the slot.
        """
        return assembled(stack, self._pieces(slots_of(stack), values))

    def whole(
        self, stacks: Iterable[tuple[BlockGroup, Sequence[int]]], values: Mapping[int, Tensor], kind: str
    ) -> dict[int, Tensor]:
        """Bring the rows of all ranks together; collective.

        Args:
            stacks: Stacks, each with the ranks that are to have all of its rows.
            values: The rows of this rank in the dtype of the parameters, by the ``id`` of the slot; there need be none
                of a copy that no such rank has a part of.
            kind: What they are counted as.

        Returns:
            Of the stacks of which this rank has all rows the blocks ``[N, o, i]``, by the ``id`` of the stack.
        """
        wanted = [(stack, tuple(receivers)) for stack, receivers in stacks]
        slots = [(slot, receivers) for stack, receivers in wanted for slot in slots_of(stack)]
        gathered = collect_rows(slots, lambda slot, rows: values[id(slot)], self._runtime, kind)
        found = {}
        for stack, receivers in wanted:
            if self._runtime.rank in receivers:
                present = [slot for slot in slots_of(stack) if not is_sharded(slot.parameter)]
                found[id(stack)] = assembled(stack, {**gathered, **self._pieces(present, values)})
        return found

    def _pieces(self, slots: Iterable[Slot], values: Mapping[int, Tensor]) -> dict[int, list[Piece]]:
        pieces: dict[int, list[Piece]] = {}
        for slot in slots:
            pieces.setdefault(id(slot.parameter), []).append((self.held(slot).start, values[id(slot)]))
        return pieces
