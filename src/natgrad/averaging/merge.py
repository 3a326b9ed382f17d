"""What nodes average, and how what arrives from other nodes is merged with what has happened since it was sent.

A message is sent after batch t and arrives S batches later; P nodes have sent their tensors, this node too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from natgrad.averaging.exchange import Exchange, Packing, PendingAverage
from natgrad.averaging.nodes import Grid
from natgrad.errors import AveragingError, require
from natgrad.preconditioner import Preconditioner
from natgrad.state.block_group import BlockGroup
from natgrad.state.tensors import along

Merge = Literal["paper", "delta"]
Momentum = Literal["keep", "average", "reset"]


def merge_paper_(current: Sequence[Tensor], summed: Sequence[Tensor], waited: int, nodes: int) -> None:
    """Weigh the tensors of now against those that were sent, in place: x = (2 S x + Σ x_sent) / (2 S + P).

    A convex combination: what was not negative (variances) stays so. With S = 0 (`waited`) it is the plain mean.

    Source: Coquelin et al. 2021, eq. 1.
    """
    torch._foreach_mul_(list(current), 2 * waited / (2 * waited + nodes))
    torch._foreach_add_(list(current), list(summed), alpha=1 / (2 * waited + nodes))


def merge_delta_(current: Sequence[Tensor], sent: Sequence[Tensor], summed: Sequence[Tensor], nodes: int) -> None:
    """Move the tensors of now by how far the sent ones were from their mean, in place: x += Σ x_sent / P - x_sent.

    What the node has learned since stays whole, and the merge does not move the mean over the nodes.
    """
    torch._foreach_add_(list(current), list(summed), alpha=1 / nodes)
    torch._foreach_sub_(list(current), list(sent))


class AveragedTensors:
    """Some tensors that are averaged over nodes together, at once or S batches after they were sent.

    Parameters that are cast to 16 bits themselves cannot follow steps below their own rounding: at a small learning
    rate training stops. With `wire` their differences from a shared reference travel, the last values that all nodes
    had in common, and are rounded relative to themselves. With the merge "delta" what was rounded off stays in the
    node's parameters, and leaves with the next exchange.

    Attributes:
        name: Their name in states.
        tensors: Returns them, anew each time.
        exchange: Sums them over the nodes.
        reference: The shared reference, as messages in full precision, the same bits on all ranks that hold the same
            tensors; empty where there is none.
    """

    def __init__(
        self,
        name: str,
        exchange: Exchange,
        tensors: Callable[[], Sequence[Tensor]],
        merge: Merge = "paper",
        wire: torch.dtype | None = None,
    ) -> None:
        """Send nothing yet. `merge` is "paper" for what must not become negative; `wire` None sends the tensors."""
        self.name, self.exchange, self.tensors = name, exchange, tensors
        self.reference: list[Tensor] = []
        self._packing = Packing([])  # the layout of the reference
        self._merge, self._wire = merge, wire
        self._pending: PendingAverage | None = None

    def start_reference(self) -> None:
        """Take the tensors of now, which are equal on all nodes, as the shared reference, unless there is one."""
        if self._wire is not None and not self.reference:
            tensors = self.tensors()
            self._packing = Packing(tensors)
            self.reference = self._packing.pack(tensors)

    def drop_reference(self) -> None:
        """Free the shared reference."""
        self.reference = []

    def send(self) -> None:
        """Begin to average a copy."""
        self._pending = self._send(self.tensors(), keep=self._merge == "delta", blocking=False)

    def arrived(self) -> list[Tensor]:
        """Wait for what is under way, and return its sums over the nodes; collective in the node."""
        if self._pending is None:
            return []
        self._pending.wait()
        return self._pending.summed

    def settle(self, waited: int | None) -> None:
        """Wait for what is under way, and merge it with the tensors of now; collective in the node.

        Args:
            waited: S, the batches since it was sent; None: forget what arrives, since all ranks are made equal next.

        Raises:
            AveragingError: if the tensors are others than those that were sent.
        """
        summed = self.arrived()
        pending, self._pending = self._pending, None
        if pending is None or waited is None:
            return
        tensors, packing, nodes = self.tensors(), pending.packing, pending.nodes
        if not packing.fits(tensors):
            raise AveragingError(f"{self.name} have changed while they were under way: drain() before such a change")
        if self._wire is not None and summed:
            self._move_reference(list(torch._foreach_mul(summed, 1 / nodes)), packing)
            if self._merge == "paper":  # it takes the sums of tensors, where "delta" takes those of differences
                summed = list(torch._foreach_mul(self.reference, nodes))
        sent = packing.views(pending.sent or summed)
        for parts in zip(packing.flats(tensors), sent, packing.views(summed), strict=True):
            self._merge_(*parts, waited, nodes)
        self._write(tensors)

    def mean_(self) -> None:
        """Average at once: all ranks are equal afterwards."""
        tensors = self.tensors()
        pending = self._send(tensors, keep=False, blocking=True)
        mean = pending.mean()
        if self._wire is not None:
            self._move_reference(mean, pending.packing)
            mean = self.reference
        pending.packing.unpack(mean, tensors)
        self._write(tensors)

    def state_dict(self) -> dict[str, Any] | None:
        """Return what is under way, once it has arrived, and the shared reference; None: there is neither.

        Collective in the node where something is under way.
        """
        state: dict[str, Any] = {}
        if self._pending is not None:
            self._pending.wait()
            state = {"sent": _on_host(self._pending.sent), "summed": _on_host(self._pending.summed)}
        if self._wire is not None and (state or self.reference):
            state["anchor"] = _on_host(self.reference)
        return state or None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what was under way, as arrived, and the shared reference; of the same rank.

        Raises:
            ValueError: if it is another's, or of a training with another `wire`.
        """
        self._pending, self.reference = None, []
        if state is None:
            return
        fits = ("anchor" in state) == (self._wire is not None)
        allowed = "of a training with the same options (cycling_wire)"
        require(fits, f"state ({self.name})", sorted(state), allowed)
        tensors = self.tensors()
        packing = Packing(tensors)

        def restored(name: str) -> list[Tensor]:
            found = [vector.numel() for vector in state[name]]
            allowed = f"messages of {packing.sizes}: this rank's own state, taken with the same merge"
            require(found == packing.sizes, f"state ({self.name})", found, allowed)
            vectors = packing.pack(tensors)
            for vector, saved in zip(vectors, state[name], strict=True):
                vector.copy_(saved)
            return vectors

        if state.get("anchor"):
            self._packing, self.reference = packing, restored("anchor")
        if "summed" in state:
            sent = restored("sent") if self._merge == "delta" else []
            self._pending = PendingAverage(packing, sent, restored("summed"), self.exchange.grid.nodes)

    def _send(self, tensors: Sequence[Tensor], *, keep: bool, blocking: bool) -> PendingAverage:
        """Begin to average a copy: without a reference that fits the tensors as they are."""
        if self.reference and not self._packing.fits(tensors):
            self.drop_reference()
        wire = self._wire if self.reference else None
        return self.exchange.send(tensors, keep=keep, wire=wire, reference=self.reference, blocking=blocking)

    def _move_reference(self, mean: list[Tensor], packing: Packing) -> None:
        """Add the mean of the differences to the reference; without one the tensors themselves have been averaged."""
        if self.reference:
            torch._foreach_add_(self.reference, mean)
        else:
            self.reference, self._packing = mean, packing

    def _merge_(
        self, current: Sequence[Tensor], sent: Sequence[Tensor], summed: Sequence[Tensor], waited: int, nodes: int
    ) -> None:
        if self._merge == "delta":
            merge_delta_(current, sent, summed, nodes)
        else:
            merge_paper_(current, summed, waited, nodes)

    def _write(self, tensors: Sequence[Tensor]) -> None:
        """Write averaged `tensors` back, where `tensors()` returned copies; it did not here."""


def _on_host(vectors: Sequence[Tensor]) -> list[Tensor]:
    return [vector.cpu().clone() for vector in vectors]


class Momenta:
    """The optimizer's state tensors shaped like parameters (momenta, second moments) that all ranks have.

    An optimizer makes them when it first steps with a gradient. A scaler may skip that step in one node alone, and a
    layer may be used first in one node alone: messages must not differ meanwhile.

    Attributes:
        known: The name of the parameter and the optimizer's key of each.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Callable[[], Mapping[str, nn.Parameter]]) -> None:
        """Know of none yet; `parameters` returns the trainable ones by name, anew each time."""
        self._optimizer, self._parameters = optimizer, parameters
        self.known: list[tuple[str, str]] = []

    def agree(self, grid: Grid) -> None:
        """Find out which all ranks have; collective, and waits."""
        found = [(name, key) for name, parameter in self._parameters().items() for key in self._keys(parameter)]
        everywhere = grid.all_gather_objects(found)
        common = set(found).intersection(*everywhere)
        self.known = [pair for pair in everywhere[0] if pair in common]

    def tensors(self) -> list[Tensor]:
        """Return them, in the same order on all ranks; without those of frozen parameters."""
        parameters, state = self._parameters(), self._optimizer.state
        return [state[parameters[name]][key] for name, key in self.known if name in parameters]

    def reset(self) -> None:
        """Clear the optimizer's state of all parameters, with its step counts: they define the bias corrections."""
        for parameter in self._parameters().values():
            self._optimizer.state.pop(parameter, None)

    def _keys(self, parameter: nn.Parameter) -> Iterator[str]:
        for key, value in sorted(self._optimizer.state.get(parameter, {}).items()):
            fits = isinstance(value, Tensor) and value.shape == parameter.shape
            if fits and value.is_floating_point() and value.ndim:
                yield key


class LossScale(AveragedTensors):
    """The scale of each node's ``GradScaler``, and for how many steps it has not overflowed: all nodes take the least.

    All nodes go on as if one had skipped for all, and grow their scales in the same step again. Changes of a node's
    scale since it was sent (growth, another skip) are kept.

    A table with a row for each node travels, in which every node fills its own; the sum is the whole table. It takes 16
    bytes a node beside the parameters, and nothing waits for the device.
    """

    def __init__(self, exchange: Exchange, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        """Take a scaler that has its scale already."""
        super().__init__("scale", exchange, lambda: [self._table])
        self._scaler, self._grid = scaler, exchange.grid
        # Float64, so that multiplying by the node's weight and dividing again leaves float32 scales unchanged.
        self._table = torch.zeros(2 * self._grid.nodes, dtype=torch.float64, device=device)
        self._weights = torch.tensor(self._grid.weights, dtype=torch.float64, device=device)[:, None]

    def send(self) -> None:
        """Begin to send this node's scale to all nodes; as `AveragedTensors.send`."""
        self._table.zero_()
        self._table.view(-1, 2)[self._grid.node] = self._now()
        super().send()

    def mean_(self) -> None:
        """Agree at once: all ranks have the same scale afterwards."""
        self.send()
        self.settle(0)

    def _now(self) -> Tensor:
        """Return this node's scale, and its steps since the last overflow or growth: ``[2]``."""
        return torch.stack([tensor.to(self._table) for tensor in self._tensors_of_scaler()])

    def _tensors_of_scaler(self) -> tuple[Tensor, Tensor]:
        # The public get_scale() makes the host wait, and nothing public returns the growth tracker.
        scale, tracker = self._scaler._scale, self._scaler._growth_tracker
        assert scale is not None
        assert tracker is not None
        return scale, tracker

    def _merge_(
        self, current: Sequence[Tensor], sent: Sequence[Tensor], summed: Sequence[Tensor], waited: int, nodes: int
    ) -> None:
        torch._foreach_copy_(list(current), list(summed))

    def _write(self, tensors: Sequence[Tensor]) -> None:
        table, now = tensors[0].view(-1, 2) / self._weights, self._now()
        sent, least = table[self._grid.node], table.amin(0)
        steps_since = now[1] - sent[1]
        scale, tracker = self._tensors_of_scaler()
        scale.copy_(least[0] * (now[0] / sent[0]))
        tracker.copy_(torch.where(steps_since >= 0, least[1] + steps_since, now[1]).round())


class Factors(AveragedTensors):
    """The running averages of a preconditioner's factors with their bias corrections.

    Each node computes factors of its own batches; a block may have statistics on some nodes only. Statistics measured
    in the node's own basis (`Task.restarts`), and those of the last batch alone (`Statistic.decayed` is False), have a
    meaning in their node only and are not averaged.
    """

    def __init__(self, exchange: Exchange, preconditioner: Preconditioner) -> None:
        """Read what `preconditioner` keeps, anew each time."""
        super().__init__("factors", exchange, self._read)
        self._preconditioner = preconditioner

    def _kept(self) -> Iterator[tuple[BlockGroup, list[Tensor], list[str]]]:
        """Yield the groups that this rank keeps averages of, their weights, and which averages can be merged.

        Also groups without statistics yet, with weight 0: another node may have some.
        """
        for group in self._preconditioner.parts.groups:
            names = [spec.name for spec in group.statistics if spec.decayed and spec.name not in group.restarting]
            if group.role.keeps_averages and names:
                group.allocate_averages()
                yield group, group.weights, names

    def _read(self) -> list[Tensor]:
        tensors = []
        for group, weights, names in self._kept():
            tensors += [weight.clone() for weight in weights]
            tensors += [group.averages.read(name, slice(None)) for name in names]
        return tensors

    def _write(self, tensors: Sequence[Tensor]) -> None:
        merged = iter(tensors)
        for group, weights, names in self._kept():
            fresh, weight = [next(merged) for _ in weights], weights[0]
            for name in names:
                group.averages.write(name, slice(None), next(merged))
            # What is not averaged is divided by the same weight later.
            gain = torch.where(weight > 0, fresh[0] / weight.clamp(min=torch.finfo(weight.dtype).tiny), 1)
            for spec in group.statistics:
                if spec.name not in names and spec.decayed:
                    value = group.averages.read(spec.name, slice(None))
                    group.averages.write(spec.name, slice(None), value * along(gain, value.ndim - 1))
            torch._foreach_copy_(weights, fresh)


def describe_factors(preconditioner: Preconditioner | None) -> str | None:
    """Describe what has to be the same on all nodes for factors to be averaged; None: there are no factors."""
    if preconditioner is None:
        return None
    kinds = dict.fromkeys(type(group.curvature).__name__ for group in preconditioner.parts.groups)
    return f"{' and '.join(kinds)} by the plan {preconditioner.parts.structure.digest():08x}"


def is_replicated(preconditioner: Preconditioner, ranks: int) -> bool:
    """Return whether every rank of a node keeps the running averages of all layers."""
    plan = preconditioner.plan
    return all(plan.keeps_averages(key, rank) for key in plan.seats for rank in range(ranks))


def check_owners(preconditioner: Preconditioner, grid: Grid) -> None:
    """Check that each node has the same owners of layers, at the same local indices; collective in the node.

    Raises:
        ValueError: if the preconditioner works over other ranks than those of the node, or nodes are not equal.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    theirs, ours = (runtime.all_gather_objects(rank) for runtime in (preconditioner.parts.runtime, grid.inside))
    allowed = f"one over the ranks of its node ({ours}), as with mesh=mesh['local']"
    require(theirs == ours, "preconditioner", f"a Preconditioner over ranks {theirs}", allowed)
    equal = len(set(grid.sizes)) == 1
    require(equal, "nodes", grid.sizes, "equal where the factors of a preconditioner are averaged: so are their owners")
