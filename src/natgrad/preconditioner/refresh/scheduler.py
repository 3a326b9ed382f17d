"""Decide by a refresh rule when statistics are captured and layers are decomposed.

All ranks that act on a decision derive it from equal numbers. Every worker of a layer measures it on averages that are
identical to the last bit, and sends the decision to the other ranks. The times of a rule with a cap differ between
ranks, so each decision begins with their sum over the ranks. The host waits for the device only if a rule measures
layers in a step in which refreshes are due.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from natgrad.distributed import Communicator, Plan
from natgrad.errors import NatgradWarning, require
from natgrad.preconditioner.counters import StepCounters
from natgrad.preconditioner.refresh.decisions import (
    KEPT,
    REFRESHED,
    STOPPED,
    WAITING,
    LayerDecision,
    decide_all,
    layer_decisions,
    measure_all,
)
from natgrad.refresh import RefreshRule
from natgrad.refresh.budget import Budget, PauseFilter, StepTimes
from natgrad.refresh.rule import READS, SIDES, Reads, Side
from natgrad.state.block_group import BlockGroup

_METRICS = {REFRESHED: "layers_refreshed", KEPT: "layers_kept", STOPPED: "layers_stopped", WAITING: "layers_waiting"}


class RefreshScheduler:
    """Decides by a refresh rule which statistics are captured, and which layers are decomposed.

    Attributes:
        rule: The rule.
        budget: The credit of a rule with a cap. None: no cap.
        stopped: The names of the layers that are no longer captured.
        kept_parts: The parts that are not refreshed, of the layers that `select_layers` last returned: pairs of layer
            key and part name.
        now: Returns the time in seconds.
    """

    def __init__(self, rule: RefreshRule) -> None:
        """Start before the first step."""
        self.rule = rule
        self.budget = None if rule.share is None else Budget(rule.share)
        self.stopped: frozenset[str] = frozenset()
        self.kept_parts: frozenset[tuple[str, str]] = frozenset()
        self.now: Callable[[], float] = perf_counter
        self._work_shares: dict[str, float] = {}  # the share of all tasks, by the key of a layer that is refreshed
        self._pauses = PauseFilter()
        self._local_times = StepTimes()  # of this rank since the last decision
        self._step_ended: float | None = None
        self._spent = self._background = 0.0  # seconds by the end of the last step: of the steps, and of the thread
        self._has_warned = False

    # --- By counters ----------------------------------------------------------------------------------------------

    def due_statistics(self, progress: StepCounters) -> frozenset[Side]:
        """Return the sides whose statistics the next step captures."""
        step, last = progress.step, progress.captured
        due = (side for side in SIDES if side not in last or self.rule.factors_due(step, last[side], side))
        return frozenset(due) if self._may_spend(step) else frozenset()

    def due_parts(self, progress: StepCounters) -> frozenset[Reads]:
        """Return which parts are due in this step, by what they read: inputs, gradients or both."""
        step, last = progress.step, progress.refreshed
        due = (reads for reads in READS if reads not in last or self.rule.inverses_due(step, last[reads], reads))
        return frozenset(due) if self._may_spend(step) else frozenset()

    def _may_spend(self, step: int) -> bool:
        return self.budget is None or step >= self.budget.resume

    # --- Layer by layer -------------------------------------------------------------------------------------------

    @property
    def selects_layers(self) -> bool:
        """Whether the rule decides on each layer."""
        return self.rule.criterion is not None

    def select_layers(
        self,
        groups: Sequence[BlockGroup],
        plan: Plan[str],
        runtime: Communicator,
        usable: set[str],
        damping: float,
        progress: StepCounters,
    ) -> set[str]:
        """Decide on the `usable` layers, and return the keys of those to refresh that this rank is a worker of.

        Waits for the device if the rule measures layers. Collective if the rule has a cap, or ranks are workers of some
        layers only.

        Raises:
            ValueError: if the rule does not return a verdict on each layer.
        """
        criterion = self.rule.criterion
        if criterion is None:
            return usable
        assert criterion.measure is not None
        layers = [
            layer
            for layer in layer_decisions(groups, usable)
            if layer.begins or layer.state.outcome(layer.index) != STOPPED
        ]
        measure_all(layers, criterion.measure, self.rule.by, damping)
        decide_all(layers, criterion, plan, progress.step)
        if self.budget is not None:
            self.budget.times.add(runtime.totals(self._local_times.numbers(), "counters"))
            self._local_times = StepTimes()
            self._apply_cap(self.budget, layers, plan, progress.step)
        for layer in layers:
            last, refreshed = layer.state.last(layer.index), layer.outcome == REFRESHED
            # A waiting layer keeps its reference for the next decision, because it has not been refreshed.
            if layer.outcome != WAITING:
                last = criterion.remember(layer.value, last, renewed=refreshed)
            layer.state.note(layer.index, last, layer.outcome, layer.undamped)
            if refreshed:
                layer.begin_refresh()
        if plan.columns > 1:
            _share_decisions(groups, runtime)
        self.find_stopped(groups)
        chosen = {layer.key: layer for layer in layers if layer.outcome == REFRESHED}
        self.kept_parts = frozenset().union(*(layer.kept_parts for layer in chosen.values()))
        self._work_shares = {key: layer.work_share(layer.parts) for key, layer in chosen.items()}
        return set(chosen)

    def end_refresh(self, groups: Sequence[BlockGroup], plan: Plan[str], keys: Collection[str]) -> None:
        """Record the end of the refresh of the layers that `select_layers` returned."""
        for layer in layer_decisions(groups, keys):
            work = self._work_shares.get(layer.key, 1.0) * plan.weights[layer.key]
            self._local_times.work += work / len(plan.assignments[layer.key].workers)
            layer.state.end_refresh(layer.index, failed=any(layer.group.failures.failed_refreshes[layer.member.blocks]))

    def find_stopped(self, groups: Sequence[BlockGroup]) -> None:
        """Update `stopped`."""
        self.stopped = frozenset(
            layer.member.layer.name for layer in layer_decisions(groups) if layer.state.outcome(layer.index) == STOPPED
        )

    def _apply_cap(self, budget: Budget, layers: Sequence[LayerDecision], plan: Plan[str], step: int) -> None:
        """Postpone the layers for which there is no credit.

        If each layer has one worker, a rank only knows the changes of its own layers. It then uses the part of the
        credit that its layers have in the total work.
        """
        due = [layer for layer in layers if layer.outcome == REFRESHED and not layer.begins]
        changes = [layer.change for layer in due]
        work = [layer.work_share(layer.parts) * plan.weights[layer.key] for layer in due]
        columns = {plan.column_of(layer.key) for layer in layers}
        known = sum(weight for key, weight in plan.weights.items() if plan.column_of(key) in columns)
        part = known / (sum(plan.weights.values()) or 1.0)
        for layer, chosen in zip(due, budget.choose(changes, work, part), strict=True):
            layer.outcome = REFRESHED if chosen else WAITING
        budget.settle(step + 1)
        if budget.credit < 0 and budget.times.steps and budget.income <= 0 and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"natgrad: solves alone take more than share={budget.share} of the time; almost nothing is decomposed",
                NatgradWarning,
                stacklevel=6,  # the caller of `step`
            )

    # --- Times, for a rule with a cap -----------------------------------------------------------------------------

    @contextmanager
    def timed(self, kind: Literal["fixed", "renewing"], spent: Callable[[], float]) -> Iterator[None]:
        """Count the seconds of preconditioning within the context, by a function that returns those so far."""
        before = spent() if self.budget is not None else 0.0
        yield
        if self.budget is not None:
            setattr(self._local_times, kind, getattr(self._local_times, kind) + spent() - before)

    def end_step(self, spent: float, background: float = 0.0) -> None:
        """Record the end of a step.

        `spent` are the seconds of preconditioning so far, `background` those of a thread that worked meanwhile. They
        count as if the steps had waited for it, an upper bound of their cost. The cost of the first step counts, but
        not its duration, because the time before it is unknown.
        """
        if self.budget is None:
            return
        now, more, beside = self.now(), spent - self._spent, background - self._background
        times = self._local_times
        times.spent += more + beside
        times.renewing += beside
        times.aside += beside
        times.elapsed += more
        if self._step_ended is None:
            times.fixed = 0.0
        else:
            times.steps += 1
            times.elapsed += self._pauses.training_seconds(now - self._step_ended - more)
        self._step_ended, self._spent, self._background = now, spent, background

    # --- Metrics and checkpoints ----------------------------------------------------------------------------------

    def metrics(self, groups: Sequence[BlockGroup]) -> dict[str, float | Tensor]:
        """Return the number of layers with each decision, and the share of time, if the rule has them."""
        found: dict[str, float | Tensor] = {}
        if self.selects_layers:
            outcomes = [layer.state.outcome(layer.index) for layer in layer_decisions(groups)]
            found |= {name: outcomes.count(code) for code, name in _METRICS.items()}
        if self.budget is not None:
            found["preconditioning_share"] = self.budget.taken
        return found

    def state_dict(self, progress: StepCounters) -> dict[str, Any]:
        """Return the state that is not kept per layer."""
        state: dict[str, Any] = {}
        if self.rule.separate:
            state["captured"] = [progress.captured.get(side, -1) for side in SIDES]
            state["renewed"] = [progress.refreshed.get(reads, -1) for reads in READS]
        if self.budget is not None:
            state["budget"] = self.budget.state_dict()
            state["times"] = asdict(self._local_times)
        if remembered := self.rule.state_dict():
            state["rule"] = remembered
        return {"refresh": state} if state else {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check the state that `load_state_dict` reads. Parts that another rule did not save may be missing.

        Raises:
            ValueError: if the state has another structure.
        """
        given = state.get("refresh", {})
        require(isinstance(given, Mapping), "state['refresh']", type(given).__name__, "a dict")
        for name, keys in (("captured", SIDES), ("renewed", READS)):
            steps = given.get(name, [-1] * len(keys))
            fits = isinstance(steps, Sequence) and len(steps) == len(keys) and all(type(step) is int for step in steps)
            require(fits, f"state['refresh'][{name!r}]", steps, f"a whole number for each of {', '.join(keys)}")
        require(isinstance(given.get("rule", {}), Mapping), "state['refresh']['rule']", given.get("rule"), "a dict")
        for name, wanted in (("budget", Budget(0.5).state_dict()), ("times", asdict(StepTimes()))):
            numbers = given.get(name, {})
            fits = isinstance(numbers, Mapping) and (not numbers or numbers.keys() == wanted.keys())
            fits = fits and all(isinstance(number, (int, float)) for number in numbers.values())
            require(fits, f"state['refresh'][{name!r}]", numbers, f"a number for each of {', '.join(wanted)}")

    def load_state_dict(self, state: Mapping[str, Any], progress: StepCounters, groups: Sequence[BlockGroup]) -> None:
        """Restore what `state_dict` returned, after `check_state` and after everything else is restored."""
        given = state.get("refresh", {})
        if self.rule.separate and {"captured", "renewed"} <= given.keys():
            progress.captured = {side: step for side, step in zip(SIDES, given["captured"], strict=True) if step >= 0}
            progress.refreshed = {reads: step for reads, step in zip(READS, given["renewed"], strict=True) if step >= 0}
        if self.budget is not None:
            self.budget = Budget(self.budget.share)
            self._local_times, self._step_ended = StepTimes(**given.get("times", {})), None
            if "budget" in given:
                self.budget.load_state_dict(given["budget"])
        if "rule" in given:
            self.rule.load_state_dict(given["rule"])
        self.find_stopped(groups)


def _share_decisions(groups: Sequence[BlockGroup], runtime: Communicator) -> None:
    """Send the decisions on each layer from its first worker to all ranks."""
    decided = [(group, group.decisions) for group in groups if group.decisions is not None]
    if not decided:
        return
    numbers = [
        state.numbers if group.role.assignment.workers[0] == runtime.rank else torch.zeros_like(state.numbers)
        for group, state in decided
    ]
    message = torch.cat(numbers).flatten().to(groups[0].device)
    runtime.sum_(message, {"counters": len(message)})
    received = message.cpu().view(-1, 3).split([len(own) for own in numbers])
    for (_, state), rows in zip(decided, received, strict=True):
        state.numbers.copy_(rows)
