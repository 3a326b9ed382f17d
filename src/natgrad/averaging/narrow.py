"""Parameters that travel between nodes in 16 bits, beside the computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from natgrad.averaging.anchor import Anchor
from natgrad.averaging.exchange import Exchange, Flight
from natgrad.averaging.finite import Witnessed
from natgrad.averaging.merge import Merge
from natgrad.averaging.vector import MESSAGE_BYTES, Packing
from natgrad.errors import require


class Narrow(Witnessed):
    """Parameters of which the differences from the mean of the last exchange travel, in a narrow dtype.

    All nodes know that mean, though each has gone on by itself since, and every rank of a node is told the sums: to
    wait for what is under way is collective in the node. Each exchange rounds how far a node has gone since the last
    one, as narrow gradients are rounded step by step; with the merge "delta" what was rounded off stays in the node's
    own parameters, and leaves with the next exchange.
    """

    def __init__(
        self,
        exchange: Exchange,
        tensors: Callable[[], Sequence[Tensor]],
        merge: Merge,
        wire: torch.dtype,
        budget: int = MESSAGE_BYTES,
    ) -> None:
        """Take no memory yet.

        Args:
            exchange: One that tells all ranks of a node the sums.
            tensors: As `natgrad.averaging.cargo.Cargo` takes it, as is `merge`.
            merge: The rule.
            wire: The dtype.
            budget: The bytes of a message at most.
        """
        super().__init__("parameters", exchange, tensors, merge)
        self._narrow, self._anchor = wire, Anchor(budget)

    def anchor(self) -> None:
        """Take the tensors of now, which are equal on all ranks, for what nodes go on from, unless there is such."""
        if not self._anchor.vectors:
            self.witness = None
            self._anchor.take(self.tensors())

    def drop(self) -> None:
        """Give up the memory, where all ranks become equal otherwise."""
        self._anchor.drop()
        self._exchange.release()

    def mean_(self, turn: int) -> None:
        """Average at once: all ranks are equal afterwards."""
        moved, wire = self._outgoing()
        self._exchange.mean_(turn, moved, wire)
        self._anchor.move_(moved)
        self._anchor.put(self.tensors())
        self.drop()

    def state_dict(self) -> dict[str, Any] | None:
        """Return the anchor, too; None: there is neither."""
        flight = super().state_dict()
        return {**(flight or {"turn": None}), "anchor": self._anchor.state_dict()} if self._anchor.vectors else None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from there; of the same rank.

        Raises:
            ValueError: if it is another's, or of wide messages under way.
        """
        self._anchor.drop()
        flight = None
        if state is not None:
            require("anchor" in state, "state (parameters)", sorted(state), "of a training with cycling_wire")
            self._anchor.load_state_dict(state["anchor"], self.tensors())
            flight = {name: part for name, part in state.items() if name != "anchor"}
        super().load_state_dict(None if flight is None or flight["turn"] is None else flight)

    def _outgoing(self) -> tuple[Sequence[Tensor], torch.dtype | None]:
        tensors = self.tensors()
        if self._anchor.fits(tensors):
            return self._anchor.moved(tensors), self._narrow
        self._anchor.zero(tensors)  # others than before: they themselves travel, as they are
        return self._anchor.moved(tensors), None

    def _packing(self, flight: Flight) -> Packing:
        return self._anchor.packing

    def _arrived(self, flight: Flight) -> None:
        self._anchor.move_(flight.summed, 1 / flight.weights)
        if self._merge == "paper":  # it takes the sums of parameters, where the other takes those of differences
            torch._foreach_copy_(flight.summed, self._anchor.vectors)
            torch._foreach_mul_(flight.summed, flight.weights)
