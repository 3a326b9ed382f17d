"""What travels between nodes: the tensors, the exchange they travel by, and how what arrives joins them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from natgrad.averaging.exchange import Exchange, Flight
from natgrad.averaging.merge import Merge, merge_delta_, merge_paper_
from natgrad.averaging.vector import Packing
from natgrad.errors import AveragingError, require


class Cargo:
    """Some tensors that are averaged over nodes together, at once or S batches later.

    Attributes:
        name: What it is called in states.
        tensors: Returns them, anew each time.
    """

    def __init__(
        self, name: str, exchange: Exchange, tensors: Callable[[], Sequence[Tensor]], merge: Merge = "paper"
    ) -> None:
        """Load nothing yet.

        Args:
            name: What it is called in states.
            exchange: Does it.
            tensors: Returns the tensors, the same in number and shape on all ranks.
            merge: How those of now and those that were sent are joined; "paper" for what must not become negative.
        """
        self.name, self.tensors = name, tensors
        self._exchange, self._merge = exchange, merge
        self._flight: Flight | None = None

    def send(self, turn: int) -> None:
        """Begin to average a copy."""
        outgoing, wire = self._outgoing()
        self._flight = self._exchange.send(turn, outgoing, keep=self._merge == "delta", wire=wire)

    def settle(self, waited: int | None) -> None:
        """Wait for what is under way, and join it with the tensors of now; collective in the node.

        Args:
            waited: S, the batches since it was sent; None: forget what arrives, for all ranks are to be equal next.

        Raises:
            AveragingError: if the tensors are others than those that were sent.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return
        flight.wait()
        if waited is None:
            return
        tensors = self.tensors()
        packing = self._packing(flight)
        if not packing.fits(tensors):
            raise AveragingError(f"{self.name} have changed while they were under way: drain() before such a change")
        if flight.summed:
            self._arrived(flight)
            own, summed = packing.pieces(tensors), packing.views(flight.summed)
            sent = packing.views(flight.sent) if flight.sent else summed
            for pieces in zip(own, sent, summed, strict=True):
                self._join(*pieces, waited, flight.weights)
        self._exchange.spread(flight.turn, tensors)
        self._put(tensors)

    def mean_(self, turn: int) -> None:
        """Average at once, in full precision: all ranks are equal afterwards."""
        tensors = self.tensors()
        self._exchange.mean_(turn, tensors)
        self._put(tensors)

    def state_dict(self) -> dict[str, Any] | None:
        """Return what is under way, once it has arrived; None: nothing."""
        if self._flight is None:
            return None
        self._flight.wait()
        copies = {name: [v.cpu().clone() for v in getattr(self._flight, name)] for name in ("sent", "summed")}
        return {"turn": self._flight.turn, **copies}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Have arrived what had arrived then; of the same rank.

        Raises:
            ValueError: if it is another's.
        """
        self._flight = None
        if state is None:
            return
        allowed = "of a training with the same options (cycling_wire)"
        require(state.keys() == {"turn", "sent", "summed"}, f"state ({self.name})", sorted(state), allowed)
        flight = self._exchange.flight(state["turn"], self._outgoing()[0], keep=self._merge == "delta")
        for name in ("sent", "summed"):
            ours, theirs = getattr(flight, name), state[name]
            sizes = [vector.numel() for vector in theirs]
            wanted = [vector.numel() for vector in ours]
            allowed = f"messages of {wanted}: this rank's own state, taken with the same merge"
            require(sizes == wanted, f"state ({self.name})", sizes, allowed)
            for vector, loaded in zip(ours, theirs, strict=True):
                vector.copy_(loaded)
        self._flight = flight

    def _outgoing(self) -> tuple[Sequence[Tensor], torch.dtype | None]:
        """Return what is sent of the tensors, and in which dtype if in a narrower one."""
        return self.tensors(), None

    def _packing(self, flight: Flight) -> Packing:
        """Return where in the messages which of the tensors lies."""
        return flight.packing

    def _arrived(self, flight: Flight) -> None:
        """See the sums that have arrived, in front of `_join`."""

    def _put(self, tensors: Sequence[Tensor]) -> None:
        """Take back what `tensors` returned, averaged by now; where those are the tensors themselves they are there."""

    def _join(
        self, own: Sequence[Tensor], sent: Sequence[Tensor], summed: Sequence[Tensor], waited: int, senders: int
    ) -> None:
        if self._merge == "delta":
            merge_delta_(own, sent, summed, senders)
        else:
            merge_paper_(own, summed, waited, senders)
