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
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from natgrad.errors import NatgradWarning, require
from natgrad.placement import Plan
from natgrad.progress import Progress
from natgrad.refresh import Clock
from natgrad.refresh.budget import Budget, Pace, Times
from natgrad.refresh.sides import READS, SIDES, Reads, Side
from natgrad.renewal.judged import Judged, judged, measure
from natgrad.renewal.record import KEPT, RENEWED, STOPPED, WAITS
from natgrad.stacks.blocks import Stack

# Placements whose sums go to workers alone, or nowhere.
_SCATTERED = ("reduce-scatter", "dp")
_METRICS = {RENEWED: "layers_refreshed", KEPT: "layers_kept", STOPPED: "layers_stopped", WAITS: "layers_waiting"}


class Agenda:
    """What is due, by a clock.

    Attributes:
        clock: The clock.
        budget: The account of a clock with a cap.
        without: The names of the layers that are captured no more.
        kept: Of the layers that `choose` has chosen last the parts that stay as they are, by the keys of the layers and
            their own names.
        now: The time in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        """Begin with nothing known."""
        self.clock = clock
        self.budget = None if clock.share is None else Budget(clock.share)
        self.without: frozenset[str] = frozenset()
        self.kept: frozenset[tuple[str, str]] = frozenset()
        self._shares: dict[str, float] = {}  # of the work of renewing those layers, what was to be done
        self.now: Callable[[], float] = perf_counter
        self._pace = Pace()
        self._own = Times()  # of this rank, since it was told last
        self._lap: float | None = None  # when the last step ended
        self._paid = self._aside = 0.0  # what had been spent by then, and taken beside the steps
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
        layers = [one for one in judged(stacks, usable) if one.begins or one.record.verdict(one.index) != STOPPED]
        measure(layers, rule, self.clock.by, damping)
        for one in layers:
            one.judge(rule)
        if self.budget is not None:
            self._spare(self.budget, layers, plan, progress.step)
        for one in layers:
            last, renewed = one.record.last(one.index), one.verdict == RENEWED
            # Who waits is compared with the same at the next decision: its change is still to be made good.
            own = last if one.verdict == WAITS else rule.remember(one.value, last, renewed=renewed)
            one.record.note(one.index, own, one.verdict, one.seen)
            if renewed:
                one.begin()
        for stack in stacks:
            if stack.record is not None:
                stack.record.told = True
        chosen = {one.key: one for one in layers if one.verdict == RENEWED}
        self.kept = frozenset().union(*(one.kept for one in chosen.values()))
        self._shares = {key: one.share for key, one in chosen.items()}
        return set(chosen)

    def renewed(self, stacks: Sequence[Stack], plan: Plan[str], keys: Collection[str]) -> None:
        """Note that renewing the layers of some `keys`, which `choose` has chosen, has ended, be it in failure."""
        for one in judged(stacks, keys):
            self._own.work += self._shares.get(one.key, 1.0) * plan.weights[one.key] / len(plan.seats[one.key].workers)
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
            one.member.layer.name for one in judged(stacks) if one.record.verdict(one.index) == STOPPED
        )

    def _spare(self, budget: Budget, layers: Sequence[Judged], plan: Plan[str], step: int) -> None:
        """Have those of the layers wait for which there is no time.

        Where each layer has one worker, a rank knows the changes of its own alone: it has the part of the credit that
        is the part of its layers in all work.
        """
        self._read_times()
        waiting = [one for one in layers if one.verdict == RENEWED and not one.begins]
        changes, work = [one.change for one in waiting], [one.share * plan.weights[one.key] for one in waiting]
        columns = {plan.home(one.key) for one in layers}
        own = sum(weight for key, weight in plan.weights.items() if plan.home(key) in columns)
        part = own / (sum(plan.weights.values()) or 1.0)
        for one, chosen in zip(waiting, budget.choose(changes, work, part), strict=True):
            one.verdict = RENEWED if chosen else WAITS
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

    def lap(self, spent: float, aside: float = 0.0) -> None:
        """Note that a step ends, and that preconditioning has `spent` so many seconds so far.

        Of the first step the rest is not known: it costs, but tells nothing of what a step takes. What it has taken
        `aside`, while the steps went on, costs as much as if they had waited: more it cannot have cost them.
        """
        if self.budget is None:
            return
        now, more, beside = self.now(), spent - self._paid, aside - self._aside
        self._own.add([0.0, 0.0, beside, 0.0, beside, 0.0, beside])
        if self._lap is None:
            self._own.fixed = 0.0
            self._own.add([0.0, more, more, 0.0, 0.0, 0.0, 0.0])
        else:
            rest = self._pace.count(now - self._lap - more)
            self._own.add([1.0, more + rest, more, 0.0, 0.0, 0.0, 0.0])
        self._lap, self._paid, self._aside = now, spent, aside

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
        """Take the seconds of all ranks, summed up ``[7]``, where there are any."""
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
            verdicts = [one.record.verdict(one.index) for one in judged(stacks)]
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
