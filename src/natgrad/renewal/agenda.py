"""What a training remembers of its clock, and what it says of the coming step: which sides, which layers.

Decisions come from counters and numbers that are the same on all ranks that act on them. Every worker of a layer
measures it for itself, on averages that are the same to the last bit, and decides at once. Who is no worker learns of
it in the same step: verdicts ride with the preconditioned gradients, and act in the next. The seconds of a clock with a
cap, which differ between ranks, ride with the sums. The host reads nothing where no renewal is due.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from natgrad.errors import NatgradWarning, require
from natgrad.placement import Plan
from natgrad.progress import Progress
from natgrad.refresh import Clock
from natgrad.refresh.budget import Budget, Pace, Times
from natgrad.refresh.rule import Rule
from natgrad.refresh.sides import READS, SIDES, Reads, Side
from natgrad.renewal.measure import measurable, measured
from natgrad.renewal.record import KEPT, RENEWED, STOPPED, WAITS, Record
from natgrad.stacks.blocks import Member, Stack

# Placements whose sums go to workers alone, or nowhere.
_SCATTERED = ("reduce-scatter", "dp")
_VERDICTS = {"renew": RENEWED, "keep": KEPT, "stop": STOPPED}
_METRICS = {RENEWED: "layers_refreshed", KEPT: "layers_kept", STOPPED: "layers_stopped", WAITS: "layers_waiting"}


@dataclass
class _Layer:
    """A layer that is decided on, and what is known of it.

    Attributes:
        stack: Its stack.
        member: Its place there.
        index: Its number there.
        record: What is remembered of it.
        value: What was measured.
        seen: What of it is of the statistics alone, without damping.
    """

    stack: Stack
    member: Member
    index: int
    record: Record
    value: float = nan
    seen: float = nan

    @property
    def key(self) -> str:
        return self.member.layer.key

    @property
    def begins(self) -> bool:
        """Whether it has nothing to go on with: it was never renewed as a whole, or what it has was found unusable."""
        rungs = self.stack.rungs
        sunk = rungs.suspected and rungs.sunk is not None and bool(rungs.sunk[self.member.blocks].any())
        return not self.stack.ready[self.index] or sunk

    def judge(self, rule: Rule, change: float) -> float:
        """Return the verdict on it; where nothing was captured since the last one, nobody knows what has settled."""
        if self.begins:
            return RENEWED
        verdict = _VERDICTS[rule.verdict(change)]
        return KEPT if verdict == STOPPED and self.seen == self.record.seen(self.index) else verdict


class Agenda:
    """What is due, by a clock.

    Attributes:
        clock: The clock.
        budget: The account of a clock with a cap.
        without: The names of the layers that are captured no more.
        now: The time in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        """Begin with nothing known."""
        self.clock = clock
        self.budget = None if clock.share is None else Budget(clock.share)
        self.without: frozenset[str] = frozenset()
        self.now: Callable[[], float] = perf_counter
        self._pace = Pace()
        self._own = Times()  # of this rank, since it was told last
        self._lap: float | None = None  # when the last step ended
        self._paid = 0.0  # what had been spent by then
        self._pending: list[Tensor] = []  # of all ranks, not yet read
        self._warned = False

    def sides(self, progress: Progress) -> frozenset[Side]:
        """Return the sides whose statistics the coming step captures."""
        step, last = progress.step, progress.captured
        due = (side for side in SIDES if self.clock.factors_due(step, last.get(side), side))
        return frozenset(due) if self._solvent(step) else frozenset()

    def reads(self, progress: Progress) -> frozenset[Reads]:
        """Return what those parts read that are to be renewed in this step: one side, the other, or both."""
        step, last = progress.step, progress.renewed
        due = (reads for reads in READS if self.clock.inverses_due(step, last.get(reads), reads))
        return frozenset(due) if self._solvent(step) else frozenset()

    def _solvent(self, step: int) -> bool:
        return self.budget is None or step >= self.budget.resume

    # --- Layers -------------------------------------------------------------------------------------------------

    def choose(
        self, stacks: Sequence[Stack], plan: Plan[str], usable: set[str], damping: float, progress: Progress
    ) -> set[str]:
        """Decide on each layer; return the keys of those that this rank renews with its other workers.

        This waits for the device, where there is a rule.

        Args:
            stacks: All stacks.
            plan: The workers.
            usable: The keys of the layers that have statistics.
            damping: γ.
            progress: The step.
        """
        rule = self.clock.rule
        if rule is None:
            return usable
        layers = [one for one in _layers(stacks, usable) if one.begins or one.record.verdict(one.index) != STOPPED]
        _measure(layers, rule, damping)
        lasts = [one.record.last(one.index) for one in layers]
        changes = [rule.change(one.value, last) for one, last in zip(layers, lasts, strict=True)]
        verdicts = [one.judge(rule, change) for one, change in zip(layers, changes, strict=True)]
        if self.budget is not None:
            self._spare(self.budget, layers, changes, verdicts, plan, progress.step)
        for one, last, verdict in zip(layers, lasts, verdicts, strict=True):
            # Who waits is compared with the same at the next decision: its change is still to be made good.
            own = last if verdict == WAITS else rule.remember(one.value, last, renewed=verdict == RENEWED)
            one.record.note(one.index, own, verdict, one.seen)
            if verdict == RENEWED:
                one.record.begin(one.index)
        for stack in stacks:
            if stack.record is not None:
                stack.record.told = True
        return {one.key for one, verdict in zip(layers, verdicts, strict=True) if verdict == RENEWED}

    def renewed(self, stacks: Sequence[Stack], plan: Plan[str], keys: Collection[str]) -> None:
        """Note that renewing the layers of some `keys`, which `choose` has chosen, has ended, be it in failure."""
        for one in _layers(stacks, keys):
            self._own.work += plan.weights[one.key] / len(plan.seats[one.key].workers)
            one.record.end(one.index, failed=any(one.stack.rungs.behind[one.member.blocks]))

    def hear(self, stacks: Sequence[Stack]) -> None:
        """Take the verdicts that others have told in this step, if there are any; this waits for them."""
        told = [stack for stack in stacks if stack.record is not None and stack.record.told]
        for stack in told:
            assert stack.record is not None
            stack.record.told = False
            if stack.record.heard is not None and not stack.role.works:
                stack.record.hear(stack.record.heard.tolist())
            stack.record.heard = None
        if told:
            self.look(stacks)

    def look(self, stacks: Sequence[Stack]) -> None:
        """Find the layers that are stopped."""
        self.without = frozenset(
            one.member.layer.name for one in _layers(stacks) if one.record.verdict(one.index) == STOPPED
        )

    def _spare(
        self,
        budget: Budget,
        layers: Sequence[_Layer],
        changes: Sequence[float],
        verdicts: list[float],
        plan: Plan[str],
        step: int,
    ) -> None:
        """Have those of the layers wait for which there is no time.

        Where each layer has one worker, a rank knows the changes of its own alone: it has the part of the credit that
        is the part of its layers in all work.
        """
        self._read_times()
        open_ = [index for index, verdict in enumerate(verdicts) if verdict == RENEWED and not layers[index].begins]
        work = [plan.weights[layers[index].key] for index in open_]
        columns = {plan.home(one.key) for one in layers}
        own = sum(weight for key, weight in plan.weights.items() if plan.home(key) in columns)
        part = own / (sum(plan.weights.values()) or 1.0)
        for index, chosen in zip(open_, budget.choose([changes[index] for index in open_], work, part), strict=True):
            verdicts[index] = RENEWED if chosen else WAITS
        budget.settle(step + 1)
        if budget.credit < 0 and budget.times.steps and budget.income <= 0 and not self._warned:
            self._warned = True
            warnings.warn(
                f"natgrad: solves alone take more than share={budget.share} of the time; next to nothing is renewed",
                NatgradWarning,
                stacklevel=6,  # past `_update_inverses`, `_renew`, `step` and its decorator
            )

    # --- Seconds ------------------------------------------------------------------------------------------------

    @contextmanager
    def timed(self, what: Literal["fixed", "renewing"], spent: Callable[[], float]) -> Iterator[None]:
        """Count the seconds of preconditioning that pass meanwhile as some of a kind.

        Args:
            what: The field of `Times`.
            spent: Returns all of them so far.
        """
        before = spent() if self.budget is not None else 0.0
        yield
        if self.budget is not None:
            setattr(self._own, what, getattr(self._own, what) + spent() - before)

    def lap(self, spent: float) -> None:
        """Note that a step ends, and that preconditioning has `spent` so many seconds so far.

        Of the first step the rest is not known: it costs, but tells nothing of what a step takes.
        """
        if self.budget is None:
            return
        now, more = self.now(), spent - self._paid
        if self._lap is None:
            self._own.fixed = 0.0
            self._own.add([0.0, more, more, 0.0, 0.0, 0.0])
        else:
            rest = self._pace.count(now - self._lap - more)
            self._own.add([1.0, more + rest, more, 0.0, 0.0, 0.0])
        self._lap, self._paid = now, spent

    def tell(self, message: Literal["sums", "gradients"], plan: Plan[str]) -> list[float]:
        """Return what the others are to hear of this rank's seconds, once; nothing without a cap.

        Args:
            message: What they would travel with: preconditioned gradients where no sums go to all ranks.
            plan: Tells which that is.
        """
        scattered = plan.columns > 1 and plan.placement.name in _SCATTERED
        if self.budget is None or message != ("gradients" if scattered else "sums"):
            return []
        told, self._own = self._own.numbers(), Times()
        return told

    def hear_times(self, times: Tensor | Sequence[float] | None) -> None:
        """Take the seconds of all ranks, summed up ``[6]``, where there are any."""
        if isinstance(times, Tensor):
            self._pending.append(times.clone())
        elif times and self.budget is not None:
            self.budget.times.add(times)

    def _read_times(self) -> None:
        """Add up what was heard, one by one: the same to the last bit on ranks that read sooner, for a checkpoint."""
        if self._pending:
            for heard in torch.stack([own.to(self._pending[-1]) for own in self._pending]).tolist():
                self.hear_times(heard)
            self._pending.clear()

    # --- What the user may ask ----------------------------------------------------------------------------------

    def metrics(self, stacks: Sequence[Stack]) -> dict[str, float | Tensor]:
        """Return how many layers have which verdict, and the share of time; nothing of a clock that has none."""
        found: dict[str, float | Tensor] = {}
        if self.clock.rule is not None:
            verdicts = [one.record.verdict(one.index) for one in _layers(stacks)]
            found |= {name: verdicts.count(code) for code, name in _METRICS.items()}
        if self.budget is not None:
            found["preconditioning_share"] = self.budget.taken
        return found

    def state_dict(self, progress: Progress) -> dict[str, Any]:
        """Return what a training that resumes goes on from, beside what is remembered of layers."""
        state: dict[str, Any] = {}
        if self.clock.separate:
            state["captured"] = [progress.captured.get(side, -1) for side in SIDES]
            state["renewed"] = [progress.renewed.get(reads, -1) for reads in READS]
        if self.budget is not None:
            self._read_times()
            state["budget"] = self.budget.state_dict()
        return {"refresh": state} if state else {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check what `load_state_dict` will read; what another clock has written is not missed.

        Raises:
            ValueError: if it is of another kind.
        """
        own = state.get("refresh", {})
        require(isinstance(own, Mapping), "state['refresh']", type(own).__name__, "a dict")
        for name, keys in (("captured", SIDES), ("renewed", READS)):
            steps = own.get(name, [-1] * len(keys))
            fits = isinstance(steps, Sequence) and len(steps) == len(keys) and all(type(step) is int for step in steps)
            require(fits, f"state['refresh'][{name!r}]", steps, f"a whole number for each of {', '.join(keys)}")
        budget, wanted = own.get("budget", {}), Budget(0.5).state_dict().keys()
        fits = isinstance(budget, Mapping) and (not budget or budget.keys() >= wanted)
        fits = fits and all(isinstance(number, (int, float)) for number in budget.values())
        require(fits, "state['refresh']['budget']", budget, f"a number for each of {', '.join(wanted)}")

    def load_state_dict(self, state: Mapping[str, Any], progress: Progress, stacks: Sequence[Stack]) -> None:
        """Restore what `state_dict` returned and `check_state` has passed, once the rest is restored."""
        own = state.get("refresh", {})
        if self.clock.separate and {"captured", "renewed"} <= own.keys():
            progress.captured = {side: step for side, step in zip(SIDES, own["captured"], strict=True) if step >= 0}
            progress.renewed = {reads: step for reads, step in zip(READS, own["renewed"], strict=True) if step >= 0}
        if self.budget is not None:
            self.budget = Budget(self.budget.share)
            self._own, self._lap, self._pending = Times(), None, []
            if "budget" in own:
                self.budget.load_state_dict(own["budget"])
        self.look(stacks)


def _layers(stacks: Sequence[Stack], keys: Collection[str] | None = None) -> Iterator[_Layer]:
    """Yield the layers of some `keys` that this rank works for; None: all layers."""
    for stack in stacks:
        if stack.record is None or (keys is not None and not stack.role.works):
            continue
        for index, member in enumerate(stack.members):
            if keys is None or member.layer.key in keys:
                yield _Layer(stack, member, index, stack.record)


def _measure(layers: Sequence[_Layer], rule: Rule, damping: float) -> None:
    """Measure layers, in one go for each device; those that cannot be measured have no number."""
    stacks = {id(one.stack): one.stack for one in layers if measurable(one.stack.curvature, rule.measure)}
    found: dict[torch.device, list[tuple[Stack, Tensor]]] = {}
    for stack in stacks.values():
        if stack.weight is not None and (stack.held or rule.measure != "basis"):
            found.setdefault(stack.device, []).append((stack, measured(stack, rule.measure)))
    values: dict[tuple[int, int], float] = {}
    for pairs in found.values():
        numbers = iter(torch.cat([own.double() for _, own in pairs]).tolist())
        values |= {(id(stack), index): next(numbers) for stack, _ in pairs for index in range(len(stack.members))}
    for one in layers:
        one.seen = values.get((id(one.stack), one.index), nan)
        damped = rule.measure == "trace"
        one.value = one.seen + damped * damping * one.stack.factor * one.stack.parameters(one.member)
