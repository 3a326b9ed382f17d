"""What all ranks have had in common last, and how far they have gone from there: that travels in few bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from natgrad.averaging.exchange import Exchange
from natgrad.averaging.vector import MESSAGE_BYTES, Packing
from natgrad.errors import require


class Anchor:
    """A copy of tensors that is the same on all ranks, in full precision.

    Parameters that are cast to 16 bits themselves cannot follow steps below their own rounding: at a small learning
    rate training stops. Their differences from an anchor are rounded relative to themselves.
    """

    def __init__(self, budget: int = MESSAGE_BYTES) -> None:
        """Take no memory yet.

        Args:
            budget: The bytes of a message at most.
        """
        self._budget = budget
        self.packing = Packing([], budget)
        self.vectors: list[Tensor] = []

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether it is one of such tensors."""
        return bool(self.vectors) and self.packing.fits(tensors)

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors that are equal on all ranks."""
        self.zero(tensors)
        self.packing.pack(tensors, self.vectors)

    def zero(self, tensors: Sequence[Tensor]) -> None:
        """Be zero, which all ranks have in common always: what such tensors move from there is they themselves."""
        if not self.fits(tensors):
            self.packing = Packing(tensors, self._budget)
            self.vectors = self.packing.empty()
        for vector in self.vectors:
            vector.zero_()

    def drop(self) -> None:
        """Give up the memory."""
        self.vectors = []

    def moved(self, tensors: Sequence[Tensor], into: list[Tensor] | None = None) -> list[Tensor]:
        """Return how far tensors have gone, as messages, in memory of their own or of such an earlier answer."""
        moved = into if into and self.packing.fits(tensors) else self.packing.empty()
        self.packing.pack(tensors, moved)
        if moved:
            torch._foreach_sub_(moved, self.vectors)
        return moved

    def move_(self, by: Sequence[Tensor], scale: float = 1.0) -> None:
        """Go by messages that are equal on all ranks, times `scale`."""
        if self.vectors:
            torch._foreach_add_(self.vectors, list(by), alpha=scale)

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Copy it into tensors."""
        self.packing.unpack(self.vectors, tensors)

    def state_dict(self) -> list[Tensor]:
        """Return the messages."""
        return [vector.cpu().clone() for vector in self.vectors]

    def load_state_dict(self, state: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Be what it was then, of such tensors.

        Raises:
            ValueError: if it was one of others.
        """
        wanted, found = [m.numel for m in Packing(tensors, self._budget).messages], [len(own) for own in state]
        require(found == wanted, "state (anchor)", found, f"messages of {wanted}: this rank's own state")
        self.zero(tensors)
        for vector, own in zip(self.vectors, state, strict=True):
            vector.copy_(own)


class Anchored:
    """Averages tensors over nodes at once, as narrow differences from what all ranks had in common last."""

    def __init__(
        self,
        exchange: Exchange,
        differences: Exchange,
        tensors: Callable[[], Sequence[Tensor]],
        wire: torch.dtype | None,
        budget: int = MESSAGE_BYTES,
    ) -> None:
        """Take no memory yet.

        Args:
            exchange: Exchanges the tensors, where there is no anchor.
            differences: Exchanges the differences.
            tensors: Returns the tensors.
            wire: The dtype of the differences on the wire; None: the tensors themselves travel as they are.
            budget: The bytes of a message at most.
        """
        self._exchange, self._differences = exchange, differences
        self._tensors, self._wire = tensors, wire
        self._anchor = Anchor(budget)
        self._moved: list[Tensor] = []

    def drop(self) -> None:
        """Give up the memory of the anchor, where ranks go their own ways."""
        self._anchor.drop()
        self._moved = []
        self._differences.release()

    def anchor(self) -> None:
        """Take the tensors of now, which are equal on all ranks, for the anchor, unless there is one."""
        if self._wire is not None and not self._anchor.vectors:
            self._anchor.take(self._tensors())

    @property
    def anchored(self) -> bool:
        """Whether there is an anchor."""
        return bool(self._anchor.vectors)

    def mean_(self, turn: int) -> None:
        """Average: all ranks are equal afterwards, and what they have is the next anchor."""
        tensors = self._tensors()
        if not self._exchange.packing(tensors).messages:
            return  # this rank holds no row of any shard, nor does its like on another node
        if not self._anchor.fits(tensors):
            self._exchange.mean_(turn, tensors)
            self._anchor.drop()
            self._moved = []
            self.anchor()
            return
        moved = self._moved = self._anchor.moved(tensors, self._moved)
        self._differences.mean_(turn, moved, self._wire)
        self._anchor.move_(moved)
        self._anchor.put(tensors)
