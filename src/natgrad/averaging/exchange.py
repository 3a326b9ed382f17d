"""Sums over the nodes: copied, sent, waited for, and told to the others of the node."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from natgrad.averaging.nodes import Grid
from natgrad.averaging.vector import MESSAGE_BYTES, Packing
from natgrad.placement import Posted
from natgrad.placement.wire import narrower


class Flight:
    """One exchange between the nodes that is under way.

    Attributes:
        turn: Whose duty it is.
        packing: Where in the messages which tensor lies.
        sent: What this node has sent, by message; empty unless it was to be kept, and where the sums are not known.
        summed: What the nodes have sent, summed by weight, once `wait` has returned; empty where it is not known.
        weights: The weights of all nodes together: P.
    """

    def __init__(self, turn: int, packing: Packing, sent: list[Tensor], summed: list[Tensor], weights: int) -> None:
        """Hold what was sent, and where its sum will be."""
        self.turn, self.packing, self.sent, self.summed, self.weights = turn, packing, sent, summed, weights
        self.posted: list[Posted] = []

    def wait(self) -> None:
        """Wait until the sums are there; free on ranks that are not on duty.

        Where these are told, or have a share of the duty, it is collective in the node.

        Raises:
            NatgradError: if another rank has stopped.
        """
        for posted in self.posted:
            posted.wait()
        self.posted = []


class Exchange:
    """Exchanges one list of tensors between the nodes, again and again, in memory of its own.

    Of replicated tensors one local index a node is on duty. Where each rank holds its own shards, each is always.
    """

    def __init__(
        self, grid: Grid, kind: str, *, everyone: bool = False, told: bool = False, budget: int = MESSAGE_BYTES
    ) -> None:
        """Take no memory yet.

        Args:
            grid: The nodes.
            kind: What `Grid.traffic` calls the tensors.
            everyone: Whether each rank is always on duty, for what it holds alone.
            told: Whether those that are not on duty are told the sums, too, in `Flight.wait`, which is then collective
                in the node; `spread` has nothing left to do.
            budget: The bytes of a message at most.
        """
        self._grid, self._kind, self._everyone, self._budget = grid, kind, everyone, budget
        self._told = told and not everyone and grid.inside.ranks > 1
        self._packing = Packing([])
        self._sent: list[Tensor] = []
        self._summed: list[Tensor] = []
        self._weight = grid.weights[grid.node]

    def packing(self, tensors: Sequence[Tensor]) -> Packing:
        """Return how some tensors are packed; the same object while they lie as they did."""
        if not self._packing.fits(tensors):
            self._packing = Packing(tensors, self._budget)
            self.release()
        return self._packing

    def release(self) -> None:
        """Give up its memory, where it is not needed soon."""
        self._sent, self._summed = [], []

    def on_duty(self, turn: int) -> bool:
        """Tell whether this rank talks to other nodes in a turn."""
        return self._everyone or self._grid.on_duty(turn)

    def send(
        self,
        turn: int,
        tensors: Sequence[Tensor],
        *,
        keep: bool = False,
        wire: torch.dtype | None = None,
        at_once: bool = False,
    ) -> Flight:
        """Begin to sum a copy of `tensors` over the nodes; they may change meanwhile. One flight at a time.

        Args:
            turn: Whose duty it is.
            tensors: The same on the ranks of a node, and alike on all.
            keep: Whether `Flight.sent` is asked for.
            wire: The dtype in which they travel, if narrower than their own; so rounded they are what was sent.
            at_once: Whether all ranks on duty wait at once: they may send more then, and round less.
        """
        flight = self.flight(turn, tensors, keep=keep)
        packing, on_duty = flight.packing, self.on_duty(turn)
        for index, (vector, pieces) in enumerate(zip(flight.summed, packing.pieces(tensors), strict=False)):
            if keep or on_duty:
                torch._foreach_copy_(packing.views(flight.summed)[index], pieces)
            self._weigh(vector, flight.sent[index] if keep else None, wire)
            if on_duty:  # the first message is on its way while the next one is packed
                flight.posted.append(self._post(vector, wire, at_once=at_once))
        if self._told:
            flight.posted.append(Posted(self._grid.inside, finish=partial(self._tell, turn, flight.summed)))
        return flight

    def _weigh(self, vector: Tensor, sent: Tensor | None, wire: torch.dtype | None) -> None:
        """Weigh a message by what this node counts, and keep in `sent` what of it the others will see."""
        rounds = narrower(wire, vector.dtype) != vector.dtype
        if sent is not None and not rounds:
            sent.copy_(vector)
        if self._weight != 1:
            vector.mul_(self._weight)
        if sent is not None and rounds:
            sent.copy_(vector.to(wire)).div_(self._weight)

    def _post(self, vector: Tensor, wire: torch.dtype | None, *, at_once: bool) -> Posted:
        """Begin to sum a message, or a share of it, over the nodes."""
        runtime, kinds = self._grid.between, {self._kind: len(vector)}
        if at_once or runtime.ranks == 1:
            return runtime.post_sum(vector, kinds, wire, runtime.group)
        return runtime.post_sum_as(vector, kinds, narrower(wire, vector.dtype))

    def flight(self, turn: int, tensors: Sequence[Tensor], *, keep: bool = False) -> Flight:
        """Return the memory of what `send` begins, with nothing under way."""
        packing, holds = self.packing(tensors), self._told or self.on_duty(turn)
        if holds:
            self._summed = self._summed or packing.empty()
            self._sent = (self._sent or packing.empty()) if keep else []
        return Flight(
            turn, packing, self._sent if holds and keep else [], self._summed if holds else [], self._grid.nodes
        )

    def spread(self, turn: int, tensors: Sequence[Tensor]) -> None:
        """Give the ranks of the node what the one on duty has; collective in the node."""
        runtime = self._grid.inside
        if self._everyone or self._told or runtime.ranks == 1:
            return
        packing = self.packing(tensors)
        self._summed = self._summed or packing.empty()
        on_duty = self.on_duty(turn)
        if on_duty:
            packing.pack(tensors, self._summed)
        self._tell(turn, self._summed)
        if not on_duty:
            packing.unpack(self._summed, tensors)

    def _tell(self, turn: int, vectors: Sequence[Tensor]) -> None:
        """Give the ranks of the node the messages of the one on duty."""
        duty = self._grid.duty(turn)
        self._grid.inside.broadcast_((duty, vector, {self._kind: vector.numel()}) for vector in vectors)

    def mean_(self, turn: int, tensors: Sequence[Tensor], wire: torch.dtype | None = None) -> None:
        """Average `tensors` over the nodes, in place, and wait: afterwards all ranks hold the same bits."""
        flight = self.send(turn, tensors, wire=wire, at_once=True)
        flight.wait()
        if flight.summed:
            if flight.weights > 1:
                torch._foreach_div_(flight.summed, flight.weights)
            self.packing(tensors).unpack(flight.summed, tensors)
        self.spread(turn, tensors)

    def mean_inside_(self, tensors: Sequence[Tensor]) -> None:
        """Average `tensors` over the ranks of the node, in place; collective in it, and waits."""
        runtime = self._grid.inside
        packing = self.packing(tensors)
        if runtime.ranks == 1 or not packing.messages:
            return
        self._summed = self._summed or packing.empty()
        packing.pack(tensors, self._summed)
        posted = [runtime.post_sum(v, {self._kind: v.numel()}, None, runtime.group) for v in self._summed]
        for one in posted:
            one.wait()
        torch._foreach_div_(self._summed, runtime.ranks)
        packing.unpack(self._summed, tensors)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Give all ranks what rank 0 has, or of shards what the first node has."""
        runtime = self._grid.between
        packing = self.packing(tensors)
        if self.on_duty(0) and runtime.ranks > 1:
            self._summed = self._summed or packing.empty()
            if runtime.rank == 0:
                packing.pack(tensors, self._summed)
            runtime.broadcast_((0, vector, {self._kind: vector.numel()}) for vector in self._summed)
            packing.unpack(self._summed, tensors)
        self.spread(0, tensors)
