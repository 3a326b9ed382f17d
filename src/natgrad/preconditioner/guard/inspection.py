"""Detect layers without usable statistics: used in other ways than by forward, broadcast, or not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from natgrad.capture.sums import StatisticsBuffer
from natgrad.curvature.kfac import TableKFAC
from natgrad.distributed import Communicator
from natgrad.distributed.fsdp import local, own_rows
from natgrad.errors import warn
from natgrad.layers import Layer
from natgrad.linalg import tensor_on
from natgrad.preconditioner.guard.guard import FailureCounters
from natgrad.state.block_group import BlockGroup, LayerBlocks

_MISUSED = "its weight serves more than lookups"
_UNCALLED = "its forward was never called"
_NOT_FINITE = "its statistics have not been finite yet"
_BROADCAST = "its input is broadcast over the samples"
# The number of layers that a warning names.
_NAMED = 5


class Inspection:
    """Finds layers that are not used through their modules' forward. Their gradients are not preconditioned.

    Attributes:
        not_finite: The keys of the layers without curvature, because their statistics have not been finite yet.
    """

    def __init__(self) -> None:
        self._looked = self._has_changed = False
        self._misused: set[str] = set()
        self._uncalled: set[str] = set()
        self._broadcast: set[str] = set()
        self.not_finite: set[str] = set()
        self._differentiated: set[str] = set()  # layers without statistics that have a gradient
        self._warned: set[str] = set()

    @property
    def reasons(self) -> dict[str, str]:
        """Why layers are not preconditioned, by layer key."""
        found = dict.fromkeys(self.not_finite, _NOT_FINITE) | dict.fromkeys(self._uncalled, _UNCALLED)
        return found | dict.fromkeys(self._misused, _MISUSED) | dict.fromkeys(self._broadcast, _BROADCAST)

    @property
    def looked(self) -> bool:
        """Whether `look` does nothing in this step: it was called before, or the layers have changed."""
        return self._looked or self._has_changed

    def restart(self, *, captures: bool) -> None:
        """Start again, because the layers have changed: in this step if the hooks capture it, else in the next."""
        self._looked, self._has_changed = False, not captures

    def look(self, groups: list[BlockGroup], sums: StatisticsBuffer, runtime: Communicator) -> None:
        """Find tables with gradients in rows that were not looked up, as from ``F.linear(h, table.weight)``.

        The gradient of such a row would be divided by the damping alone. The check waits for the device, so it is done
        only once, with the `sums` over all ranks. Each rank may hold a part of the gradients.

        Also learn on which layers any rank has seen inputs that are broadcast over the samples.
        """
        if self.looked:
            return
        self._looked = True
        tables = [member.layer for _, member in _tables(groups)]
        layers = [member.layer for group in groups for member in group.members]
        if not layers or (runtime.ranks == 1 and not (tables or sums.broadcast)):
            return
        # Sums that are on other ranks are checked there.
        strays = [
            _strays(member.layer, _lookups(group, member, sums, runtime))
            if group.role.keeps_averages
            else torch.zeros((), device=group.device)
            for group, member in _tables(groups)
        ]
        flags = tensor_on(groups[0].device, [float(layer.name in sums.broadcast) for layer in layers])
        found = torch.cat([flags, *(stray.to(flags)[None] for stray in strays)])
        runtime.sum_(found, "counters")
        broadcast, strayed = found.split([len(layers), len(tables)])
        self._broadcast = {layer.key for layer, flag in zip(layers, broadcast.tolist(), strict=True) if flag > 0}
        self._misused = {layer.key for layer, stray in zip(tables, strayed.tolist(), strict=True) if stray > 0}

    def usable(
        self, groups: list[BlockGroup], seen: set[str], failures: FailureCounters, *, captured: bool
    ) -> set[str]:
        """Return the keys of the layers whose curvature may be refreshed, of those `seen`, which have statistics.

        `captured` says whether the hooks captured statistics in this step.
        """
        self.not_finite = self.not_finite - seen
        if captured and not self._has_changed:
            # A rank that only uses its own samples may have gradients of samples that it has not captured.
            complete = (
                group for group in groups if group.role.keeps_averages and group.role.assignment.sums != "alone"
            )
            received = (member.layer for group in complete for member in group.members)
            unseen = [layer for layer in received if layer.key not in seen | self._broadcast]
            skipped = failures.skipped_factors() if unseen else set()
            self.not_finite = {layer.key for layer in unseen} & skipped
            self._differentiated = {layer.key for layer in unseen if _has_gradient(layer)}
            self._uncalled = self._differentiated - skipped
        # After loading a checkpoint, a layer without curvature may be one that was found before.
        waiting = (
            [] if self._looked else [m.layer.key for s, m in _tables(groups) if not s.state.ready[s.members.index(m)]]
        )
        return seen.difference(self._misused, self._broadcast, waiting)

    def report(self) -> None:
        """Warn once of each layer, at the end of a step."""
        self._has_changed = False
        self._warn(
            self._misused,
            "some rows have one without any lookup. Give a functional head a layer of the same weight "
            "(head.weight = embedding.weight), and leave penalties on the weight to the optimizer",
        )
        self._warn(
            self._broadcast,
            "their input is broadcast over the samples, as positions [1, T] are, and the optimizer moves them. To "
            "precondition them, call them with inputs of all samples, such as position_ids of shape [batch, T]",
        )
        self._warn(self._uncalled, "their layers were never called. Call the modules themselves")
        self._warn(
            self.not_finite & self._differentiated,
            "their statistics are not finite, as after an overflow. natgrad tries again with the next ones",
        )

    def _warn(self, keys: set[str], why: str) -> None:
        fresh = sorted(keys - self._warned)
        self._warned |= keys
        if fresh:
            names = ", ".join(fresh[:_NAMED]) + (f" and {len(fresh) - _NAMED} more" if len(fresh) > _NAMED else "")
            message = f"natgrad has no curvature for {names}: {why}; see explain()"
            warn(message, "no-curvature")


def _tables(groups: Iterable[BlockGroup]) -> Iterator[tuple[BlockGroup, LayerBlocks]]:
    """Yield the untied tables with K-FAC, whose statistic D counts the lookups of each row."""
    tables = (group for group in groups if isinstance(group.curvature, TableKFAC))
    return ((group, member) for group in tables for member in group.members if member.layer.form == "one-hot")


def _lookups(group: BlockGroup, member: LayerBlocks, sums: StatisticsBuffer, runtime: Communicator) -> Tensor:
    """Return how often all ranks have looked up each row ``[V]``; collective for deferred sums."""
    lookups = sums.of(member.layer.name)["D"][0]
    if group.role.assignment.sums == "later":
        lookups = lookups.clone()
        runtime.sum_(lookups, "counters")
    return lookups


def _strays(table: Layer, lookups: Tensor) -> Tensor:
    """Return whether this rank holds nonzero gradient rows that were not looked up; `lookups` of each row ``[V]``."""
    slot = table.slots[0]
    gradient = slot.parameter.grad
    if gradient is None:
        return torch.zeros((), device=lookups.device)
    start, rows = own_rows(slot.name, gradient)
    largest = torch.linalg.vector_norm(rows, math.inf, dim=1)  # without a copy as large as the table
    strays = (largest > 0) & (lookups[start : start + len(rows)] == 0)
    return torch.logical_and(strays.any(), lookups.any()).float()


def _has_gradient(layer: Layer) -> bool:
    """Return whether any gradient of a layer is not zero, of the rows that this rank holds, and all are finite."""
    gradients = [slot.parameter.grad for slot in layer.slots if slot.parameter.grad is not None]
    return any(0 < float(local(gradient).abs().sum(dtype=torch.float32)) < math.inf for gradient in gradients)
