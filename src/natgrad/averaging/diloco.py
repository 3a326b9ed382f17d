"""DiLoCo and Streaming DiLoCo: an outer optimizer steps with the mean change of the nodes' parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from natgrad.averaging.base import Averager, check_parts
from natgrad.averaging.checks import check_saved
from natgrad.averaging.exchange import MESSAGE_BYTES, Packing, PendingAverage, flat
from natgrad.averaging.nodes import Nodes
from natgrad.errors import require
from natgrad.linalg.precision import at_least_float32
from natgrad.schedule import check_number, check_whole, is_whole


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop - 1`` of the flattened parameter with number ``index``."""

    index: int
    start: int
    stop: int


def cut(sizes: Sequence[int], fragments: int) -> list[list[Piece]]:
    """Return the pieces of each fragment, where concatenated tensors of `sizes` are cut into equal fragments."""
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
    """A part of the concatenated parameters, and its exchange.

    Attributes:
        pieces: The pieces of parameters that it consists of.
        offset: It is sent after batch t if ``t - offset`` is a multiple of the interval.
        shared: The shared parameters of each piece ``[n]``, in at least float32, bitwise equal on all ranks.
        pending: The exchange of its outer gradients, if one is in progress.
        sent_at: The batch after which it was last sent.
    """

    pieces: list[Piece]
    offset: int
    shared: list[Tensor] = field(default_factory=list)
    pending: PendingAverage | None = None
    sent_at: int = 0


class StreamingDiLoCo(Averager):
    """Nodes train independently; an outer optimizer with Nesterov momentum steps with their mean change.

    Each fragment of the parameters x is sent every `batches_between` batches, at its own offset: node n sends
    Δ_n = y - x_n, where y are the shared parameters. `batches_to_wait` batches later, y makes an outer step with the
    mean of Δ_n as gradient, and x = mixing · x + (1 - mixing) · y. Fragments are equal parts of the concatenated
    parameters; the source uses whole layers.

    Source: Douillard et al. 2025, algorithm 2. With one fragment, no wait and no mixing: Douillard et al. 2023.
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
        """Make process groups, and broadcast the parameters and buffers of rank 0; collective.

        Args:
            model: Plain (its gradients are then averaged in the node by `step`), in ``DistributedDataParallel`` over
                the ranks of the node, or sharded over them by FSDP2.
            optimizer: The inner optimizer. Its state is not exchanged.
            mesh: A ``DeviceMesh`` with dimensions ("node", "local").
            nodes: Instead of `mesh`, the number of ranks of each node. None, without a mesh: from torchrun.
            batches_between: H, the batches between two messages of a fragment.
            batches_to_wait: τ, the batches between a fragment's message and its merge, at most H.
            fragments: The number of fragments, at most H.
            mixing: α, the weight of the node's parameters in the merge.
            outer_learning_rate: The learning rate of the outer optimizer.
            outer_momentum: The momentum of the outer optimizer. 0: plain gradient descent, which with a learning rate
                of 1 averages the parameters.
            wire: The dtype in which Δ is sent, if narrower than the parameters. All ranks use the rounded values, the
                sender included.
            message_bytes: The largest message; longer ones are split.

        Raises:
            ValueError: if an argument is not allowed.
            AveragingError: on all ranks, if their models or options differ. Nothing has been changed then.
        """
        check_number("outer_learning_rate", outer_learning_rate, "a number > 0", minimum=0, strict=True)
        check_number("outer_momentum", outer_momentum, "a number from 0 to below 1", minimum=0)
        require(outer_momentum < 1, "outer_momentum", outer_momentum, "a number from 0 to below 1")
        check_whole("batches_between", batches_between, 1)
        for name, number, least in (("batches_to_wait", batches_to_wait, 0), ("fragments", fragments, 1)):
            fits = is_whole(number) and least <= number <= batches_between
            require(fits, name, number, f"a whole number from {least} to batches_between ({batches_between})")
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
        self._fragments = [Fragment(part, n * batches_between // fragments) for n, part in enumerate(pieces)]
        for fragment in self._fragments:
            fragment.shared = [
                vector.to(at_least_float32(vector.dtype), copy=True) for vector in self._vectors(fragment)
            ]
        self._shared = [vector for fragment in self._fragments for vector in fragment.shared]
        self._outer = torch.optim.SGD(
            self._shared, lr=float(outer_learning_rate), momentum=outer_momentum, nesterov=outer_momentum > 0
        )

    def step(self, loss: Tensor | float | None = None) -> None:
        """Average gradients in the node, step the inner optimizer, and send or merge fragments if due.

        Args:
            loss: Ignored.
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
        """Wait for the fragments in progress and merge them, oldest first; collective."""
        for fragment in sorted(self._fragments, key=lambda fragment: fragment.sent_at):
            if fragment.pending is not None:
                self._merge(fragment)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, shared parameters, outer momenta and messages in progress, after waiting for these.

        Collective. The state is equal on all ranks, unless the model is sharded.
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
        """Restore a state, after model and optimizer have been loaded.

        Raises:
            ValueError: if it is the state of another averager, model or number of fragments, or has parameters, momenta
                or messages that are not finite. Nothing has been changed then.
        """
        parts = {"batches", "sends", "merges", "sent", "flights", "outer"}
        check_parts(state, parts, self)
        wanted, found = len(self._fragments), state["sent"]
        require(len(found) == wanted, "state['sent']", found, f"of {wanted} fragments")
        outer = state["outer"]
        shapes = [tuple(parameter.shape) for parameter in self._shared]
        parameters = [outer["parameters"].get(str(index)) for index in range(len(outer["parameters"]))]
        check_saved("state['outer']", parameters, shapes, f"of parameters shaped {shapes}")
        momenta = {index: outer["momenta"].get(str(index)) for index in range(len(shapes))}
        kept = [index for index, momentum in momenta.items() if momentum is not None]
        allowed = f"of momenta shaped {[shapes[index] for index in kept]}"
        check_saved("state['outer']", [momenta[index] for index in kept], [shapes[index] for index in kept], allowed)
        packings = [Packing(fragment.shared) for fragment in self._fragments]
        messages = []
        for number, packing in enumerate(packings):
            saved = state["flights"].get(str(number))
            messages.append(None if saved is None else [saved.get(str(index)) for index in range(len(saved))])
            if messages[-1] is not None:
                allowed = f"messages of {packing.sizes}, or a state taken after drain()"
                check_saved("state['flights']", messages[-1], [(size,) for size in packing.sizes], allowed)
        for index, parameter in enumerate(self._shared):
            parameter.copy_(outer["parameters"][str(index)])
            momentum = momenta[index]
            restored = {} if momentum is None else {"momentum_buffer": momentum.to(parameter, copy=True)}
            self._outer.state[parameter] = restored
        self._batches, self._sends, self._merges = state["batches"], state["sends"], state["merges"]
        for fragment, packing, sent_at, saved in zip(self._fragments, packings, found, messages, strict=True):
            fragment.sent_at, fragment.pending = sent_at, None
            if saved is not None:
                summed = packing.pack(fragment.shared)
                torch._foreach_copy_(summed, saved)
                fragment.pending = PendingAverage(packing, [], summed, self.grid.nodes)

    def metrics(self) -> dict[str, float | Tensor]:
        """Return the intervals, the numbers of messages and merges, and the host seconds spent on messages."""
        return {
            "batches_between": self.batches_between,
            "batches_to_wait": self.batches_to_wait,
            "synchronizations": self._sends,
            "merges": self._merges,
            **super().metrics(),
        }

    def _send(self, fragment: Fragment) -> None:
        """Start to average the outer gradients Δ_n of a fragment."""
        vectors = self._vectors(fragment)
        gradients = [shared - vector for shared, vector in zip(fragment.shared, vectors, strict=True)]
        fragment.pending = self._exchange.send(gradients, wire=self.wire)
        fragment.sent_at = self._batches
        self._sends += 1

    def _merge(self, fragment: Fragment) -> None:
        """Step the outer optimizer on a fragment, and mix the shared parameters into the node's."""
        assert fragment.pending is not None
        pending, fragment.pending = fragment.pending, None
        gradients = [torch.empty_like(parameter) for parameter in fragment.shared]
        pending.packing.unpack(pending.mean(), gradients)
        for parameter, gradient in zip(fragment.shared, gradients, strict=True):
            parameter.grad = gradient
        self._outer.step()
        self._outer.zero_grad()
        current = self._vectors(fragment)
        shared = [vector.to(target.dtype) for vector, target in zip(fragment.shared, current, strict=True)]
        if self.mixing:
            torch._foreach_lerp_(current, shared, 1 - self.mixing)
        else:
            torch._foreach_copy_(current, shared)
        self._merges += 1

    def _vectors(self, fragment: Fragment) -> list[Tensor]:
        """Return flat views ``[n]`` of this rank's parameters in a fragment."""
        vectors = [flat(parameter) for parameter in self.parameters()]
        return [vectors[piece.index][piece.start : piece.stop] for piece in fragment.pieces]


class DiLoCo(StreamingDiLoCo):
    """Nodes train independently; every `batches_between` batches an outer optimizer steps with their mean change.

    After this step the parameters are bitwise equal on all ranks.

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
        """Make process groups, and broadcast the parameters and buffers of rank 0; collective.

        Args:
            model: As in `StreamingDiLoCo`.
            optimizer: The inner optimizer. Its state is not exchanged.
            mesh: A ``DeviceMesh`` with dimensions ("node", "local").
            nodes: Instead of `mesh`, the number of ranks of each node. None, without a mesh: from torchrun.
            batches_between: H, the batches between two outer steps; 500 in the source.
            outer_learning_rate: The learning rate of the outer optimizer.
            outer_momentum: The momentum of the outer optimizer.
            wire: The dtype in which changes are sent, if narrower than the parameters.
            message_bytes: The largest message; longer ones are split.

        Raises:
            ValueError: if an argument is not allowed.
            AveragingError: on all ranks, if their models or options differ. Nothing has been changed then.
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
