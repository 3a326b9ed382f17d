"""Streaming DiLoCo: an outer optimizer on what the nodes have learned, one fragment after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from natgrad.averaging.base import Averager, check_parts
from natgrad.averaging.exchange import Exchange, Flight
from natgrad.averaging.nodes import Nodes
from natgrad.averaging.outer import Outer
from natgrad.averaging.vector import MESSAGE_BYTES, Piece, flat
from natgrad.errors import require
from natgrad.schedule import check_number, check_whole


def cut(sizes: Sequence[int], fragments: int) -> list[list[Piece]]:
    """Cut tensors, laid end to end, into fragments of equal size (within one element), which may end inside a tensor.

    Args:
        sizes: The elements of each tensor.
        fragments: How many; one without an element has no piece.
    """
    total = sum(sizes)
    bounds = [total * number // fragments for number in range(fragments + 1)]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        [
            Piece(index, max(low, start) - start, min(high, start + size) - start)
            for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
            if max(low, start) < min(high, start + size)
        ]
        for low, high in pairwise(bounds)
    ]


@dataclass
class Fragment:
    """A part of the parameters, and its message.

    Attributes:
        pieces: Where it lies.
        chosen: The numbers of its pieces among those of all fragments.
        offset: It is sent at the batches that exceed a multiple of the interval by so many.
        exchange: Sums it over the nodes.
        flight: Its message, while that is under way.
        sent_at: The batch after which it was last sent.
        arriving: Room for what its message brings.
    """

    pieces: list[Piece]
    chosen: list[int]
    offset: int
    exchange: Exchange
    flight: Flight | None = None
    sent_at: int = 0
    arriving: list[Tensor] = field(default_factory=list)


class StreamingDiLoCo(Averager):
    """Nodes train alone; an outer optimizer with Nesterov's momentum takes what they have learned as gradient.

    Every `batches_between` batches each fragment of the parameters x is sent, the fragments in turn: node n sends
    Δ_n = y - x_n, where y are the parameters that all nodes agree on. After `batches_to_wait` more batches y makes a
    step with the mean of Δ_n as gradient, and x = mixing · x + (1 - mixing) · y. Fragments are equal parts of the flat
    parameters, where the source takes whole layers.

    Source: Douillard et al. 2025, algorithm 2; with one fragment, no wait and no mixing Douillard et al. 2023.
    """

    _duty = "sharded"

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        mesh: DeviceMesh | None = None,
        nodes: Nodes | None = None,
        batches_between: int = 100,
        batches_to_wait: int = 5,
        fragments: int = 4,
        mixing: float = 0.5,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        wire: torch.dtype | None = None,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        """Make groups, and give all ranks the parameters of rank 0; collective.

        Args:
            model: As `Averager` describes it, as all that is not described here.
            optimizer: The inner one, which is left alone.
            mesh: The nodes.
            nodes: The nodes.
            batches_between: H, batches between two messages of a fragment.
            batches_to_wait: τ, batches between a fragment's message and its use, at most H.
            fragments: How many; at most H.
            mixing: α, what stays of the node's own parameters.
            outer_learning_rate: Of the outer optimizer.
            outer_momentum: Of the outer optimizer; 0: plain gradient descent, which at a learning rate of 1 averages.
            wire: The dtype in which Δ travels, if narrower than the parameters; all ranks, the sender too, use what is
                decoded from it.
            message_bytes: How long a message may be.

        Raises:
            ValueError: if an argument is not allowed.
            AveragingError: on all ranks, if their models or options differ; then nothing was changed.
        """
        outer = Outer(outer_learning_rate, outer_momentum)
        check_whole("batches_between", batches_between, 1)
        check_whole("batches_to_wait", batches_to_wait, 0, batches_between)
        check_whole("fragments", fragments, 1, batches_between)
        check_number("mixing", mixing, "a number from 0 to below 1", minimum=0)
        require(mixing < 1, "mixing", mixing, "a number from 0 to below 1")
        fits = wire is None or wire in (torch.bfloat16, torch.float16)
        require(fits, "wire", wire, "None, torch.bfloat16 or torch.float16")
        super().__init__(
            model,
            optimizer,
            mesh=mesh,
            nodes=nodes,
            message_bytes=message_bytes,
            options={
                "batches_between": batches_between,
                "batches_to_wait": batches_to_wait,
                "fragments": fragments,
                "mixing": mixing,
                "outer_learning_rate": outer_learning_rate,
                "outer_momentum": outer_momentum,
                "wire": wire,
            },
        )
        self.batches_between, self.batches_to_wait = batches_between, batches_to_wait
        self.mixing, self.wire = mixing, wire
        self._batches = self._sends = self._merges = 0
        self._outer = outer
        self._fragments: list[Fragment] = []
        taken = 0
        for number, pieces in enumerate(cut([flat(each).numel() for each in self.parameters()], fragments)):
            chosen = list(range(taken, taken + len(pieces)))
            taken += len(pieces)
            exchange = self.exchange("deltas")
            self._fragments.append(Fragment(pieces, chosen, number * batches_between // fragments, exchange))
        self._outer.start([each for fragment in self._fragments for each in self._own(fragment)])

    def step(self, loss: Tensor | float | None = None) -> None:
        """Average gradients in the node, step the inner optimizer, and send or take over the fragments that are due.

        Args:
            loss: Not used.
        """
        self._check_open()
        self.step_optimizer()
        self._batches += 1
        for fragment in self._fragments:
            if fragment.flight is not None and self._batches - fragment.sent_at >= self.batches_to_wait:
                self._merge(fragment)
            if (self._batches - fragment.offset) % self.batches_between == 0:
                self._send(fragment)
                if self.batches_to_wait == 0:
                    self._merge(fragment)

    def drain(self) -> None:
        """Wait for the fragments under way, oldest first, and merge them at once; collective."""
        for fragment in sorted(self._fragments, key=lambda one: one.sent_at):
            if fragment.flight is not None:
                self._merge(fragment)

    def state_dict(self) -> dict[str, Any]:
        """Return batches, outer parameters with their momenta, and what is under way; waits for it, collective.

        All ranks return the same, unless the model is sharded.
        """
        flights = {}
        for number, fragment in enumerate(self._fragments):
            if fragment.flight is not None:
                fragment.flight.wait()
                flights[str(number)] = {str(index): each for index, each in enumerate(fragment.flight.summed)}
        sent = [fragment.sent_at for fragment in self._fragments]
        counts = {"batches": self._batches, "sends": self._sends, "merges": self._merges}
        return {**counts, "sent": sent, "flights": flights, "outer": self._outer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, after model and optimizer were loaded.

        Raises:
            ValueError: if it is of another model, number of fragments or kind.
        """
        parts = {"batches", "sends", "merges", "sent", "flights", "outer"}
        check_parts(state, parts, self)
        wanted, found = len(self._fragments), state["sent"]
        require(len(found) == wanted, "state['sent']", found, f"of {wanted} fragments")
        self._outer.load_state_dict(state["outer"])
        self._batches, self._sends, self._merges = state["batches"], state["sends"], state["merges"]
        for number, (fragment, sent_at) in enumerate(zip(self._fragments, found, strict=True)):
            fragment.sent_at, fragment.flight = sent_at, None
            saved = state["flights"].get(str(number))
            if saved is not None:
                fragment.arriving = [torch.empty_like(self._outer.held[index]) for index in fragment.chosen]
                fragment.flight = fragment.exchange.flight(0, fragment.arriving)
                torch._foreach_copy_(fragment.flight.summed, [saved[str(index)] for index in range(len(saved))])

    def metrics(self) -> dict[str, float | Tensor]:
        """Return how often nodes exchange, how old what they take over is, and what was waited for."""
        return {
            "batches_between": self.batches_between,
            "batches_to_wait": self.batches_to_wait,
            "synchronizations": self._sends,
            "merges": self._merges,
            **self.grid.seconds(),
        }

    def _send(self, fragment: Fragment) -> None:
        """Begin to average how far the nodes have gone in a fragment."""
        fragment.arriving = self._outer.gone(self._own(fragment), fragment.chosen)
        fragment.flight = fragment.exchange.send(0, fragment.arriving, wire=self.wire)
        fragment.sent_at = self._batches
        self._sends += 1

    def _merge(self, fragment: Fragment) -> None:
        """Let the outer optimizer make its step in a fragment, and go on from there."""
        assert fragment.flight is not None
        flight, fragment.flight = fragment.flight, None
        flight.wait()
        arrived, fragment.arriving = fragment.arriving, []
        flight.packing.unpack(flight.summed, arrived)
        torch._foreach_div_(arrived, flight.weights)
        own = self._own(fragment)
        agreed = self._outer.step(arrived, fragment.chosen)
        agreed = [each.to(mine.dtype) for each, mine in zip(agreed, own, strict=True)]
        if self.mixing:
            torch._foreach_lerp_(own, agreed, 1 - self.mixing)
        else:
            torch._foreach_copy_(own, agreed)
        self._merges += 1

    def _own(self, fragment: Fragment) -> list[Tensor]:
        """Return this rank's parameters of a fragment, as vectors."""
        flats = [flat(each) for each in self.parameters()]
        return [flats[piece.index][piece.start : piece.stop] for piece in fragment.pieces]
