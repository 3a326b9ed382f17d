"""Averages of tensors over nodes, and their merge with the tensors of a node that has trained in the meantime.

Each of P nodes sends its tensors after batch t and merges their sum S batches later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from natgrad.averaging.checks import check_saved
from natgrad.averaging.exchange import Exchange, Packing, PendingAverage
from natgrad.averaging.nodes import Grid
from natgrad.errors import AveragingError, require
from natgrad.preconditioner import Preconditioner
from natgrad.state.averages import allocate_averages, bias_corrections
from natgrad.state.block_group import BlockGroup
from natgrad.state.tensors import along

Merge = Literal["paper", "delta"]
Momentum = Literal["keep", "average", "reset"]


def merge_paper_(current: Sequence[Tensor], summed: Sequence[Tensor], waited: int, nodes: int) -> None:
    """Replace current tensors in place by x = (2 S x + Σ x_sent) / (2 S + P), where S is `waited` and P is `nodes`.

    The result is a convex combination, so that variances stay non-negative. With S = 0 it is the mean.

    Source: Coquelin et al. 2021, eq. 1.
    """
    torch._foreach_mul_(list(current), 2 * waited / (2 * waited + nodes))
    torch._foreach_add_(list(current), list(summed), alpha=1 / (2 * waited + nodes))


def merge_delta_(current: Sequence[Tensor], sent: Sequence[Tensor], summed: Sequence[Tensor], nodes: int) -> None:
    """Shift current tensors in place by the mean of the sent ones minus this node's: x += Σ x_sent / P - x_sent.

    The node's steps since then are kept in full, and the mean over the nodes does not change.
    """
    torch._foreach_add_(list(current), list(summed), alpha=1 / nodes)
    torch._foreach_sub_(list(current), list(sent))


class AveragedTensors:
    """Tensors that are averaged over nodes together, synchronously or S batches after they were sent.

    With `wire`, the messages are differences from a shared reference, the last values that all nodes had in common.
    Parameters rounded to 16 bits would lose the small steps of a low learning rate. With the merge "delta", rounding
    errors stay in the node's parameters, and are part of its next message.

    Attributes:
        name: Their name in states.
        tensors: A function that returns the current tensors.
        exchange: Sums them over the nodes.
        reference: The shared reference as messages in full precision, bitwise equal on all ranks with the same tensors.
    """

    def __init__(
        self,
        name: str,
        exchange: Exchange,
        tensors: Callable[[], Sequence[Tensor]],
        merge: Merge = "paper",
        wire: torch.dtype | None = None,
    ) -> None:
        """Initialize; `merge` "paper" keeps tensors non-negative; without `wire` the tensors themselves are sent."""
        self.name, self.exchange, self.tensors = name, exchange, tensors
        self.reference: list[Tensor] = []
        self._packing = Packing([])  # the layout of the reference
        self._merge, self._wire = merge, wire
        self._pending: PendingAverage | None = None

    def start_reference(self) -> None:
        """Store the current tensors, which must be equal on all nodes, as the shared reference, unless there is one."""
        if self._wire is not None and not self.reference:
            tensors = self.tensors()
            self._packing = Packing(tensors)
            self.reference = self._packing.pack(tensors)

    def drop_reference(self) -> None:
        """Free the shared reference."""
        self.reference = []

    def send(self) -> None:
        """Start to average a copy of the tensors."""
        self._pending = self._send(self.tensors(), keep=self._merge == "delta", blocking=False)

    def arrived(self) -> list[Tensor]:
        """Wait for the exchange in progress, and return its sums over the nodes; collective in the node."""
        if self._pending is None:
            return []
        self._pending.wait()
        return self._pending.summed

    def settle(self, waited: int | None) -> None:
        """Wait for the exchange of `waited` batches ago, and merge it, or drop it (None); collective in the node.

        Raises:
            AveragingError: if the layouts of the tensors have changed since.
        """
        summed = self.arrived()
        pending, self._pending = self._pending, None
        if pending is None or waited is None:
            return
        tensors, packing, nodes = self.tensors(), pending.packing, pending.nodes
        if not packing.fits(tensors):
            raise AveragingError(f"{self.name} have changed during their exchange: call drain() before such a change")
        if self._wire is not None and summed:
            self._move_reference(list(torch._foreach_mul(summed, 1 / nodes)), packing)
            if self._merge == "paper":  # needs sums of tensors; "delta" needs sums of differences
                summed = list(torch._foreach_mul(self.reference, nodes))
        sent = packing.views(pending.sent or summed)
        for current, own_sent, sums in zip(packing.flats(tensors), sent, packing.views(summed), strict=True):
            if self._merge == "delta":
                merge_delta_(current, own_sent, sums, nodes)
            else:
                merge_paper_(current, sums, waited, nodes)
        self._write(tensors)

    def mean_(self) -> None:
        """Average synchronously. The tensors are then equal on all ranks."""
        tensors = self.tensors()
        pending = self._send(tensors, keep=False, blocking=True)
        mean = pending.mean()
        if self._wire is not None:
            self._move_reference(mean, pending.packing)
            mean = self.reference
        pending.packing.unpack(mean, tensors)
        self._write(tensors)

    def state_dict(self) -> dict[str, Any] | None:
        """Wait for the exchange in progress, and return its sums and the reference; None: there is neither."""
        state: dict[str, Any] = {}
        if self._pending is not None:
            self._pending.wait()
            state = {"sent": _on_host(self._pending.sent), "summed": _on_host(self._pending.summed)}
        if self._wire is not None and (state or self.reference):
            state["anchor"] = _on_host(self.reference)
        return state or None

    def read_state(self, state: Mapping[str, Any] | None) -> tuple[Packing, list[Tensor], PendingAverage | None]:
        """Return what `restore` takes from a state of the same rank, without changing anything.

        Raises:
            ValueError: if the state has other sizes, was taken with another `wire`, or is not finite.
        """
        tensors = self.tensors()
        packing = Packing(tensors)
        if state is None:
            return packing, [], None
        name = f"state ({self.name})"
        fits = isinstance(state, Mapping) and ("anchor" in state) == (self._wire is not None)
        allowed = "of a training with the same options (cycling_wire)"
        require(fits, name, sorted(state) if isinstance(state, Mapping) else state, allowed)

        def messages(key: str) -> list[Tensor]:
            sizes = packing.sizes
            allowed = f"messages of {sizes}: the state of this rank, taken with the same merge"
            check_saved(name, state.get(key), [(size,) for size in sizes], allowed)
            vectors = packing.pack(tensors)
            for vector, saved in zip(vectors, state[key], strict=True):
                vector.copy_(saved)
            return vectors

        reference = messages("anchor") if state.get("anchor") else []
        pending = None
        if "summed" in state:
            sent = messages("sent") if self._merge == "delta" else []
            pending = PendingAverage(packing, sent, messages("summed"), self.exchange.grid.nodes)
        return packing, reference, pending

    def restore(self, packing: Packing, reference: list[Tensor], pending: PendingAverage | None) -> None:
        """Take over the reference and the exchange in progress of a state."""
        self._packing, self.reference, self._pending = packing, reference, pending

    def _send(self, tensors: Sequence[Tensor], *, keep: bool, blocking: bool) -> PendingAverage:
        """Start to average a copy, relative to the reference if its layout fits."""
        if self.reference and not self._packing.fits(tensors):
            self.drop_reference()
        wire = self._wire if self.reference else None
        return self.exchange.send(tensors, keep=keep, wire=wire, reference=self.reference, blocking=blocking)

    def _move_reference(self, mean: list[Tensor], packing: Packing) -> None:
        """Add the mean of the differences to the reference, or store the mean of the tensors as the reference."""
        if self.reference:
            torch._foreach_add_(self.reference, mean)
        else:
            self.reference, self._packing = mean, packing

    def _write(self, tensors: Sequence[Tensor]) -> None:
        """Write averaged tensors back, if `tensors` returns copies."""


def _on_host(vectors: Sequence[Tensor]) -> list[Tensor]:
    return [vector.cpu().clone() for vector in vectors]


class Momenta:
    """The optimizer's state tensors with the shapes of parameters (momenta, second moments) that all ranks have.

    An optimizer creates them in the first step with a gradient, which may differ between nodes: a scaler skips steps
    in each node separately, and a layer may be used by one node first.

    Attributes:
        known: For each tensor the name of its parameter and its key in the optimizer's state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Callable[[], Mapping[str, nn.Parameter]]) -> None:
        """Initialize without tensors; `parameters` returns the current trainable parameters by name."""
        self._optimizer, self._parameters = optimizer, parameters
        self.known: list[tuple[str, str]] = []

    def agree(self, grid: Grid) -> None:
        """Find the tensors that all ranks have; collective and synchronous."""
        found = [(name, key) for name, parameter in self._parameters().items() for key in self._keys(parameter)]
        everywhere = grid.all_gather_objects(found)
        common = set(found).intersection(*everywhere)
        self.known = [pair for pair in everywhere[0] if pair in common]

    def tensors(self) -> list[Tensor]:
        """Return the tensors of trainable parameters, in the same order on all ranks."""
        parameters, state = self._parameters(), self._optimizer.state
        return [state[parameters[name]][key] for name, key in self.known if name in parameters]

    def reset(self) -> None:
        """Clear the optimizer's state of all parameters, including step counts, which define bias corrections."""
        for parameter in self._parameters().values():
            self._optimizer.state.pop(parameter, None)

    def _keys(self, parameter: nn.Parameter) -> Iterator[str]:
        for key, value in sorted(self._optimizer.state.get(parameter, {}).items()):
            fits = isinstance(value, Tensor) and value.shape == parameter.shape
            if fits and value.is_floating_point() and value.ndim:
                yield key


class Factors(AveragedTensors):
    """The running averages of a preconditioner's factors with their bias corrections.

    Each node computes factors from its batches, and a block may have statistics on some nodes only. Statistics that
    depend on the node's eigenbasis (`Task.restarts`) are not averaged.
    """

    def __init__(self, exchange: Exchange, preconditioner: Preconditioner) -> None:
        """Initialize for the running averages that `preconditioner` keeps on this rank."""
        super().__init__("factors", exchange, self._read)
        self._preconditioner = preconditioner

    def _groups(self) -> Iterator[tuple[BlockGroup, list[Tensor], list[str]]]:
        """Yield the groups whose averages this rank keeps, their weights, and the names of averages to be merged.

        Groups without statistics yet are included with weight 0, since another node may have some.
        """
        for group in self._preconditioner._structure.groups:
            names = [spec.name for spec in group.statistics if spec.name not in group.restarting]
            if group.role.keeps_averages and names:
                allocate_averages(group)
                yield group, bias_corrections(group), names

    def _read(self) -> list[Tensor]:
        self._preconditioner._join_averages()  # nodes average whole factors
        tensors = []
        for group, weights, names in self._groups():
            tensors += [weight.clone() for weight in weights]
            tensors += [group.state.averages.read(name, slice(None)) for name in names]
        return tensors

    def _write(self, tensors: Sequence[Tensor]) -> None:
        merged = iter(tensors)
        for group, weights, names in self._groups():
            merged_weights, weight = [next(merged) for _ in weights], weights[0]
            for name in names:
                group.state.averages.write(name, slice(None), next(merged))
            # The other averages are divided by the same weight later, so they are scaled with it.
            smallest = torch.finfo(weight.dtype).tiny
            gain = torch.where(weight > 0, merged_weights[0] / weight.clamp(min=smallest), 1)
            for spec in group.statistics:
                if spec.name not in names:
                    value = group.state.averages.read(spec.name, slice(None))
                    group.state.averages.write(spec.name, slice(None), value * along(gain, value.ndim - 1))
            torch._foreach_copy_(weights, merged_weights)


def is_replicated(preconditioner: Preconditioner, ranks: int) -> bool:
    """Return whether each of the `ranks` ranks of a node keeps the running averages of all layers."""
    plan = preconditioner.plan
    return all(plan.keeps_averages(key, rank) for key in plan.assignments for rank in range(ranks))


def check_owners(preconditioner: Preconditioner, grid: Grid) -> None:
    """Check that the preconditioner uses the ranks of the node, and that nodes have equal sizes.

    Layers then have the same owners, by local index, on each node. Collective in the node.

    Raises:
        ValueError: if it uses other ranks, or sizes differ.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    found, node = (runtime.all_gather_objects(rank) for runtime in (preconditioner._communicator, grid.inside))
    allowed = f"one over the ranks of its node ({node}), as with mesh=mesh['local']"
    require(found == node, "preconditioner", f"a Preconditioner over ranks {found}", allowed)
    equal = len(set(grid.sizes)) == 1
    require(equal, "nodes", grid.sizes, "of equal size, so that the factors of a preconditioner can be averaged")
