"""Who talks to the other nodes: one local index at a time, in rotation, or all of them, each for a share.

Both send the same bytes between nodes and inside them. In rotation they pass the port of one rank at a time; in shares
they pass the ports of all ranks at once, where each has one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from natgrad.averaging.exchange import Exchange, Flight
from natgrad.averaging.nodes import Grid
from natgrad.averaging.vector import MESSAGE_BYTES
from natgrad.errors import require
from natgrad.placement import Posted

Duty = Literal["rotating", "sharded"]


class ShardedExchange(Exchange):
    """Exchanges replicated tensors between nodes in shares: local index i sums the i-th share of each message.

    What is there after `Flight.wait` is on all ranks what the one on duty has in rotation: the same sums, to the last
    bit between two nodes (among more, the order of the addends may differ). Of tensors that differ within a node the
    i-th share is that of local index i. Indices that not every node has send no share.
    """

    def __init__(
        self, grid: Grid, kind: str, *, everyone: bool = False, told: bool = True, budget: int = MESSAGE_BYTES
    ) -> None:
        """Take the same; all ranks are `told` always, and what each holds alone (`everyone`) are shares already."""
        super().__init__(grid, kind, everyone=everyone, budget=budget)
        self._replicated = not everyone

    def on_duty(self, turn: int) -> bool:
        """Tell that this rank holds the sums, as all do."""
        return True

    def send(
        self,
        turn: int,
        tensors: Sequence[Tensor],
        *,
        keep: bool = False,
        wire: torch.dtype | None = None,
        at_once: bool = False,
    ) -> Flight:
        """Begin to sum a copy of `tensors`; waiting for it is collective in the node."""
        if not self._replicated:
            return super().send(turn, tensors, keep=keep, wire=wire, at_once=at_once)
        flight = self.flight(turn, tensors, keep=keep)
        flight.packing.pack(tensors, flight.summed)
        for index, vector in enumerate(flight.summed):
            self._weigh(vector, flight.sent[index] if keep else None, wire)
            share = self._share(vector)
            if len(share):
                flight.posted.append(self._post(share, wire, at_once=at_once))
        if flight.summed:
            flight.posted.append(Posted(self._grid.inside, finish=partial(self._gather, flight.summed)))
        return flight

    def spread(self, turn: int, tensors: Sequence[Tensor]) -> None:
        """Leave `tensors` as they are: all ranks of the node have made the same of the same sums."""

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Give all ranks what rank 0 has, or of shards what the first node has."""
        Exchange(self._grid, self._kind, everyone=not self._replicated, budget=self._budget).broadcast_(tensors)

    def _share(self, vector: Tensor) -> Tensor:
        """Return this rank's part of a message; nothing where not every node has its local index."""
        local, parts = self._grid.local, self._grid.smallest
        return vector.tensor_split(parts)[local] if local < parts else vector[:0]

    def _gather(self, vectors: Sequence[Tensor]) -> None:
        """Give the ranks of the node each other's shares: an all-gather, of shares that need not be equal."""
        inside = self._grid.inside
        if inside.ranks > 1:
            shares = [pair for vector in vectors for pair in enumerate(vector.tensor_split(self._grid.smallest))]
            inside.broadcast_((owner, share, {self._kind: len(share)}) for owner, share in shares if len(share))


EXCHANGES: dict[str, type[Exchange]] = {"rotating": Exchange, "sharded": ShardedExchange}


def check_duty(duty: object) -> None:
    """Check the name of a duty.

    Raises:
        ValueError: if there is none of that name.
    """
    require(duty in get_args(Duty), "duty", duty, " or ".join(map(repr, get_args(Duty))))
