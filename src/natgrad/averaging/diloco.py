"""DiLoCo and Streaming DiLoCo: an outer optimizer takes how far the nodes have moved as its gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from natgrad.averaging.base import Averager, check_parts
from natgrad.averaging.exchange import MESSAGE_BYTES, Packing, PendingAverage, flat
from natgrad.averaging.nodes import Nodes
from natgrad.errors import require
from natgrad.linalg.precision import at_least_float32
from natgrad.schedule import check_number, check_whole


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of the flat parameter number ``index``."""

    index: int
    start: int
    stop: int


def cut(sizes: Sequence[int], fragments: int) -> list[list[Piece]]:
    """Cut tensors of these sizes, laid end to end, into fragments of equal size (within one element)."""
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
    """A part of the flat parameters, and its message.

    Attributes:
        pieces: Its pieces of the flat parameters.
        offset: It is sent after the batches whose number exceeds a multiple of the interval by `offset`.
        shared: The shared parameters of each piece, in at least float32; the same bits on every rank.
        pending: The exchange of its outer gradients, while that is under way.
        sent_at: The batch after which it was last sent.
    """

    pieces: list[Piece]
    offset: int
    shared: list[Tensor] = field(default_factory=list)
    pending: PendingAverage | None = None
    sent_at: int = 0


class StreamingDiLoCo(Averager):
    """Nodes train alone; an outer optimizer with Nesterov's momentum takes how far they have moved as gradient.

    Every `batches_between` batches each fragment of the parameters x is sent, the fragments in turn: node n sends
    Δ_n = y - x_n, where y are the shared parameters. After `batches_to_wait` more batches y makes a
    step with the mean of Δ_n as gradient, and x = mixing · x + (1 - mixing) · y. Fragments are equal parts of the flat
    parameters, where the source takes whole layers.

    Source: Douillard et al. 2025, algorithm 2; with one fragment, no wait and no mixing Douillard et al. 2023.
    """

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
            model: As in `Averager`, like all arguments that are not described here.
            optimizer: The inner one; its state is not exchanged.
            mesh: The nodes.
            nodes: The nodes.
            batches_between: H, batches between two messages of a fragment.
            batches_to_wait: τ, batches between a fragment's message and its use, at most H.
            fragments: How many; at most H.
            mixing: α, the weight of the node's own parameters in the merge.
            outer_learning_rate: Of the outer optimizer.
            outer_momentum: Of the outer optimizer; 0: plain gradient descent, which at a learning rate of 1 averages.
            wire: The dtype in which Δ travels, if narrower than the parameters; all ranks, the sender too, use the
                rounded values.
            message_bytes: The largest message.

        Raises:
            ValueError: if an argument is not allowed.
            AveragingError: on all ranks, if their models or options differ; then nothing was changed.
        """
        check_number("outer_learning_rate", outer_learning_rate, "a number > 0", minimum=0, strict=True)
        check_number("outer_momentum", outer_momentum, "a number from 0 to below 1", minimum=0)
        require(outer_momentum < 1, "outer_momentum", outer_momentum, "a number from 0 to below 1")
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
        self._exchange = self.exchange("deltas")
        pieces = cut([flat(parameter).numel() for parameter in self.parameters()], fragments)
        self._fragments = [Fragment(own, n * batches_between // fragments) for n, own in enumerate(pieces)]
        for fragment in self._fragments:
            fragment.shared = [own.to(at_least_float32(own.dtype), copy=True) for own in self._vectors(fragment)]
        self._shared = [vector for fragment in self._fragments for vector in fragment.shared]
        self._outer = torch.optim.SGD(
            self._shared, lr=outer_learning_rate, momentum=outer_momentum, nesterov=outer_momentum > 0
        )

    def step(self, loss: Tensor | float | None = None) -> None:
        """Average gradients in the node, step the inner optimizer, and send or merge the fragments that are due.

        Args:
            loss: Not used.
        """
        self._check_open()
        self.step_optimizer()
        self._batches += 1
        for fragment in self._fragments:
            if fragment.pending is not None and self._batches - fragment.sent_at >= self.batches_to_wait:
                self._merge(fragment)
            if (self._batches - fragment.offset) % self.batches_between == 0:
                self._send(fragment)
                if self.batches_to_wait == 0:
                    self._merge(fragment)

    def drain(self) -> None:
        """Wait for the fragments under way, oldest first, and merge them at once; collective."""
        for fragment in sorted(self._fragments, key=lambda fragment: fragment.sent_at):
            if fragment.pending is not None:
                self._merge(fragment)

    def state_dict(self) -> dict[str, Any]:
        """Return batches, outer parameters with their momenta, and what is under way; waits for it, collective.

        All ranks return the same, unless the model is sharded.
        """
        pending = {}
        for number, fragment in enumerate(self._fragments):
            if fragment.pending is not None:
                fragment.pending.wait()
                vectors = enumerate(fragment.pending.summed)
                pending[str(number)] = {str(index): vector.clone() for index, vector in vectors}
        sent = [fragment.sent_at for fragment in self._fragments]
        counts = {"batches": self._batches, "sends": self._sends, "merges": self._merges}
        momenta = [self._outer.state[parameter].get("momentum_buffer") for parameter in self._shared]
        outer = {
            "parameters": {str(index): parameter for index, parameter in enumerate(self._shared)},
            "momenta": {str(index): momentum for index, momentum in enumerate(momenta) if momentum is not None},
        }
        return {**counts, "sent": sent, "flights": pending, "outer": outer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, after model and optimizer were loaded.

        Raises:
            ValueError: if it is of another model, number of fragments or kind.
        """
        parts = {"batches", "sends", "merges", "sent", "flights", "outer"}
        check_parts(state, parts, self)
        wanted, found = len(self._fragments), state["sent"]
        require(len(found) == wanted, "state['sent']", found, f"of {wanted} fragments")
        outer = state["outer"]
        shapes = [tuple(parameter.shape) for parameter in self._shared]
        saved_shapes = [tuple(outer["parameters"][str(index)].shape) for index in range(len(outer["parameters"]))]
        require(saved_shapes == shapes, "state['outer']", saved_shapes, f"of parameters shaped {shapes}")
        for index, parameter in enumerate(self._shared):
            parameter.copy_(outer["parameters"][str(index)])
            momentum = outer["momenta"].get(str(index))
            restored = {} if momentum is None else {"momentum_buffer": momentum.to(parameter, copy=True)}
            self._outer.state[parameter] = restored
        self._batches, self._sends, self._merges = state["batches"], state["sends"], state["merges"]
        for number, (fragment, sent_at) in enumerate(zip(self._fragments, found, strict=True)):
            fragment.sent_at, fragment.pending = sent_at, None
            saved = state["flights"].get(str(number))
            if saved is not None:
                packing = Packing(fragment.shared)
                messages = [saved[str(index)] for index in range(len(saved))]
                sizes = [len(message) for message in messages]
                allowed = f"messages of {packing.sizes}, or a state taken after drain(): earlier versions cut them"
                require(sizes == packing.sizes, "state['flights']", sizes, allowed)
                summed = packing.pack(fragment.shared)
                torch._foreach_copy_(summed, messages)
                fragment.pending = PendingAverage(packing, [], summed, self.grid.nodes)

    def metrics(self) -> dict[str, float | Tensor]:
        """Return the intervals, how often nodes have sent and merged, and the seconds spent on messages."""
        return {
            "batches_between": self.batches_between,
            "batches_to_wait": self.batches_to_wait,
            "synchronizations": self._sends,
            "merges": self._merges,
            **super().metrics(),
        }

    def _send(self, fragment: Fragment) -> None:
        """Begin to average how far the nodes have moved in a fragment."""
        gradients = [shared - own for shared, own in zip(fragment.shared, self._vectors(fragment), strict=True)]
        fragment.pending = self._exchange.send(gradients, wire=self.wire)
        fragment.sent_at = self._batches
        self._sends += 1

    def _merge(self, fragment: Fragment) -> None:
        """Step the outer optimizer in a fragment, and mix its parameters into the node's."""
        assert fragment.pending is not None
        pending, fragment.pending = fragment.pending, None
        gradients = [torch.empty_like(parameter) for parameter in fragment.shared]
        pending.packing.unpack(pending.mean(), gradients)
        for parameter, gradient in zip(fragment.shared, gradients, strict=True):
            parameter.grad = gradient
        self._outer.step()
        self._outer.zero_grad()
        current = self._vectors(fragment)
        shared = [vector.to(mine.dtype) for vector, mine in zip(fragment.shared, current, strict=True)]
        if self.mixing:
            torch._foreach_lerp_(current, shared, 1 - self.mixing)
        else:
            torch._foreach_copy_(current, shared)
        self._merges += 1

    def _vectors(self, fragment: Fragment) -> list[Tensor]:
        """Return views of this rank's parameters in a fragment, as vectors."""
        vectors = [flat(parameter) for parameter in self.parameters()]
        return [vectors[piece.index][piece.start : piece.stop] for piece in fragment.pieces]


class DiLoCo(StreamingDiLoCo):
    """Nodes train alone; every `batches_between` batches an outer optimizer takes the mean of how far they have moved.

    Afterwards all ranks have the same parameters, to the last bit.

    Source: Douillard et al. 2023, algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        mesh: DeviceMesh | None = None,
        nodes: Nodes | None = None,
        batches_between: int = 100,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        wire: torch.dtype | None = None,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        """Make groups, and give all ranks the parameters of rank 0; collective.

        Args:
            model: As in `StreamingDiLoCo`, like all arguments.
            optimizer: The inner one.
            mesh: The nodes.
            nodes: The nodes.
            batches_between: H; the source takes 500.
            outer_learning_rate: Of the outer optimizer.
            outer_momentum: Of the outer optimizer.
            wire: The dtype of messages.
            message_bytes: The largest message.

        Raises:
            ValueError: if an argument is not allowed.
            AveragingError: on all ranks, if their models or options differ; then nothing was changed.
        """
        super().__init__(
            model,
            optimizer,
            mesh=mesh,
            nodes=nodes,
            batches_between=batches_between,
            batches_to_wait=0,
            fragments=1,
            mixing=0.0,
            outer_learning_rate=outer_learning_rate,
            outer_momentum=outer_momentum,
            wire=wire,
            message_bytes=message_bytes,
        )
