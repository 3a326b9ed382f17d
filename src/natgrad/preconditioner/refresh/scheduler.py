"""Decide by a refresh rule when statistics are captured and layers are decomposed.

All ranks that act on a decision derive it from equal numbers. Every worker of a layer measures it on averages that are
identical to the last bit, and sends the decision to the other ranks. The host waits for the device only if a rule
measures layers in a step in which refreshes are due.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.distributed import Communicator
from natgrad.errors import NatgradError, require
from natgrad.refresh import Candidate, RefreshRule
from natgrad.refresh.rule import READS, SIDES, Reads, Side
from natgrad.state.block_group import LayerBlocks
from natgrad.state.counters import StepCounters
from natgrad.state.decisions import KEPT, REFRESHED, Decisions, DecisionState

# The multiples of the golden ratio, less their whole parts, are spread as evenly as can be.
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, eq=False)
class _Measured:
    """A layer with the decisions on its group, its index there, and its measured value."""

    member: LayerBlocks
    decisions: DecisionState
    index: int
    value: float

    @property
    def candidate(self) -> Candidate:
        """What the rule decides on."""
        return Candidate(self.member.layer.name, self.decisions.change(self.index, self.value))


class RefreshScheduler:
    """Decides by a refresh rule which statistics are captured, and which layers are decomposed."""

    def __init__(self, rule: RefreshRule) -> None:
        self.rule = rule

    def due_statistics(self, progress: StepCounters) -> frozenset[Side]:
        """Return the sides whose statistics the next step captures."""
        step, last = progress.step, progress.captured
        return frozenset(side for side in SIDES if _is_due(self.rule.factor_interval(step, side), step, last.get(side)))

    def due_parts(self, progress: StepCounters) -> frozenset[Reads]:
        """Return which parts are due in this step, by what they read: inputs, gradients or both."""
        step, last = progress.step, progress.refreshed
        due = (reads for reads in READS if _is_due(self.rule.inverse_interval(step, reads), step, last.get(reads)))
        return frozenset(due)

    def is_spread(self, progress: StepCounters) -> bool:
        """Return whether layers of the last refresh may be left for this step. The first refresh is not spread."""
        began = progress.last_inverses
        return began is not None and progress.inverse_updates > 1 and progress.step - began < self._length(began)

    def layers_at(self, keys: Sequence[str], *, began: int, step: int) -> set[str]:
        """Return the layers, of all `keys` in the model's order, that are decomposed at `step`.

        The refresh `began` before or then. The steps of neighbours are far apart, so that each step has about the same
        work, also on each rank, and they do not depend on the number of ranks. If layers change while a refresh is
        spread, some may be left out until the next.
        """
        length = self._length(began)
        return {key for index, key in enumerate(keys) if int(index * _GOLDEN % 1 * length) == step - began}

    def _length(self, began: int) -> int:
        """Return the number of steps of a refresh."""
        return min(self.rule.spread, int(self.rule.inverse_interval(began)))

    # --- Layer by layer -------------------------------------------------------------------------------------------

    @property
    def selects_layers(self) -> bool:
        """Whether the rule decides on each layer."""
        return self.rule.measure is not None

    def select_layers(self, decisions: Decisions, usable: set[str], damping: float, step: int) -> set[str]:
        """Decide on the `usable` layers of this rank, and return the keys of those to refresh.

        Layers without a usable result are refreshed in any case. Waits for the device.

        Raises:
            ValueError: if the rule returns something other than names of layers that are due.
        """
        layers = []
        for group, decided in decisions.items():
            members = [(i, member) for i, member in enumerate(group.members) if member.layer.key in usable]
            if members and group.role.is_gradient_worker:
                values = decided.measure(damping)
                layers += [_Measured(member, decided, index, values[index]) for index, member in members]
        needed = [layer for layer in layers if layer.decisions.needs_refresh(layer.index)]
        due = self._due(step, [layer.candidate for layer in layers if layer not in needed])
        refreshed = [layer for layer in layers if layer in needed or layer.member.layer.name in due]
        for layer in layers:
            layer.decisions.record(layer.index, layer.value, refreshed=layer in refreshed)
        return {layer.member.layer.key for layer in refreshed}

    def _due(self, step: int, candidates: Sequence[Candidate]) -> Collection[str]:
        """Return the names of the layers that the rule decomposes, after checking them."""
        due = self.rule.due(step, candidates) if candidates else ()
        names = [candidate.layer for candidate in candidates]
        fits = isinstance(due, Collection) and not isinstance(due, str) and all(name in names for name in due)
        require(fits, f"{type(self.rule).__name__}.due()", due, f"a set of names out of {names}")
        return due

    def end_refresh(self, decisions: Decisions, keys: Collection[str], *, dropped: bool = False) -> None:
        """Record the end of the refresh of the layers that `select_layers` returned, or that it was `dropped`."""
        for group, decided in decisions.items():
            for index, member in enumerate(group.members):
                if member.layer.key in keys:
                    decided.end_refresh(index, failed=dropped or group.state.failures.is_stale(member.blocks))

    def metrics(self, decisions: Decisions) -> dict[str, float | Tensor]:
        """Return the number of layers that were refreshed and kept at the last decision, if the rule selects layers."""
        if not self.selects_layers:
            return {}
        decided = [state.numbers[:, 1].tolist() for state in decisions.values()]
        outcomes = [outcome for layers in decided for outcome in layers]
        return {"layers_refreshed": outcomes.count(REFRESHED), "layers_kept": outcomes.count(KEPT)}

    # --- Checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self, progress: StepCounters) -> dict[str, Any]:
        """Return the state that is not kept per layer."""
        if not self.rule.separate:
            return {}
        captured = [progress.captured.get(side, -1) for side in SIDES]
        return {"refresh": {"captured": captured, "renewed": [progress.refreshed.get(reads, -1) for reads in READS]}}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise a ``ValueError`` if the state that `load_state_dict` reads has another structure."""
        given = state.get("refresh", {})
        require(isinstance(given, Mapping), "state['refresh']", type(given).__name__, "a dict")
        for name, keys in (("captured", SIDES), ("renewed", READS)):
            steps = given.get(name, [-1] * len(keys))
            fits = isinstance(steps, Sequence) and len(steps) == len(keys) and all(type(step) is int for step in steps)
            require(fits, f"state['refresh'][{name!r}]", steps, f"a whole number for each of {', '.join(keys)}")

    def load_state_dict(self, state: Mapping[str, Any], progress: StepCounters) -> None:
        """Restore what `state_dict` returned, after `check_state` and after everything else is restored."""
        given = state.get("refresh", {})
        if self.rule.separate and {"captured", "renewed"} <= given.keys():
            progress.captured = {side: step for side, step in zip(SIDES, given["captured"], strict=True) if step >= 0}
            progress.refreshed = {reads: step for reads, step in zip(READS, given["renewed"], strict=True) if step >= 0}


def _is_due(interval: float, step: int, last: int | None) -> bool:
    return last is None or step - last >= interval


def share_decisions(decisions: Decisions, runtime: Communicator) -> None:
    """Send the decisions on each layer from its first worker to all ranks, and check that all its workers agree.

    Raises:
        NatgradError: on all ranks, if the rule has decided otherwise on another worker of a layer.
    """
    if not decisions or runtime.ranks == 1:
        return
    rows = []
    for group, state in decisions.items():
        workers, row = group.role.assignment.workers, torch.zeros(len(state.numbers), 3, dtype=torch.float64)
        # A decision is one of two numbers. So the last column sums to 0 if all workers have decided as the first.
        if runtime.rank == workers[0]:
            row[:, :2], row[:, 2] = state.numbers, len(workers) * state.numbers[:, 1]
        if runtime.rank in workers:
            row[:, 2] -= state.numbers[:, 1]
        rows.append(row)
    message = torch.cat(rows).flatten().to(next(iter(decisions)).device)
    runtime.sum_(message, "counters")
    received = message.cpu().view(-1, 3).split([len(own) for own in rows])
    names = [member.layer.name for group in decisions for member in group.members]
    differing = [name for name, row in zip(names, torch.cat(received), strict=True) if row[2] != 0]
    if differing:
        raise NatgradError(
            f"the refresh rule has decided otherwise on another rank on {', '.join(differing)}: due() may depend only "
            "on its arguments and on options that are the same on every rank",
            "your-own-code",
        )
    for state, numbers in zip(decisions.values(), received, strict=True):
        state.numbers.copy_(numbers[:, :2])
