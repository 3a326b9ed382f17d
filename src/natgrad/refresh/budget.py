"""The cap on time: what preconditioning may take, what it has taken, and which renewals there is time for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from math import ceil
from statistics import median_low

# No wait is longer, even where solves alone take more than the share.
_LONGEST = 1000
# A step counts for at most _MOST times the median of the last _WINDOW.
_MOST, _WINDOW = 5, 31


@dataclass
class StepTimes:
    """Seconds of some steps, of one rank or summed over ranks. The names of the fields are keys of checkpoints.

    Attributes:
        steps: The number of steps whose whole time is known, times the ranks.
        elapsed: From the end of one step to that of the next, without pauses (`PauseFilter`).
        spent: On preconditioning.
        fixed: The part of `spent` that every step takes, renewals or not: solves and their messages.
        renewing: The part of `spent` that decompositions took, with the exchange of their results.
        work: The work of these decompositions, in the unit of `natgrad.distributed.Plan.weights`.
        aside: The part of `spent` that passed beside the steps, which did not wait for it.
    """

    steps: float = 0.0
    elapsed: float = 0.0
    spent: float = 0.0
    fixed: float = 0.0
    renewing: float = 0.0
    work: float = 0.0
    aside: float = 0.0

    def add(self, numbers: Iterable[float]) -> None:
        """Add the times of other steps or ranks, in the order of the fields."""
        for field, number in zip(fields(self), numbers, strict=True):
            setattr(self, field.name, getattr(self, field.name) + number)

    def numbers(self) -> list[float]:
        """Return all in the order of the fields."""
        return list(astuple(self))


class PauseFilter:
    """Leaves pauses between steps out of the time of training.

    An evaluation, a checkpoint or a debugger that holds the process is no time of training. It shows only in the time
    from one step to the next, so a step that takes more than five times the median of the last 31 counts as five times
    that. Where steps become longer for good, the median follows once half of its window has seen it.
    """

    def __init__(self) -> None:
        """Begin with no step seen."""
        self._seen: deque[float] = deque(maxlen=_WINDOW)

    def training_seconds(self, seconds: float) -> float:
        """Return the part of the `seconds` of a step that counts.

        The first counts whole; where the second shows that there was a pause in it, that is taken back.
        """
        self._seen.append(seconds)
        most = _MOST * median_low(self._seen)
        correction = max(0.0, self._seen[0] - most) if len(self._seen) == 2 else 0.0
        return min(seconds, most) - correction


class Budget:
    """Preconditioning earns `share` of the time that passes, and spends what it takes; all in seconds.

    Attributes:
        share: Of the time.
        times: The seconds received so far, summed over the ranks: the same on all of them.
        resume: The step before which nothing is captured or renewed.
    """

    def __init__(self, share: float) -> None:
        """Open the account."""
        self.share, self.times, self.resume = share, StepTimes(), 0

    @property
    def credit(self) -> float:
        """What may be spent now."""
        return self.share * self.times.elapsed - self.times.spent

    @property
    def taken(self) -> float:
        """The share of the time that was spent."""
        return self.times.spent / self.times.elapsed if self.times.elapsed else 0.0

    @property
    def income(self) -> float:
        """What a step without capture and renewal earns."""
        times = self.times
        if not times.steps:
            return 0.0
        fixed = times.fixed / times.steps
        alone = (times.elapsed - times.spent + times.aside) / times.steps
        return self.share * (alone + fixed) - fixed

    def choose(self, changes: Sequence[float], work: Sequence[float], part: float = 1.0) -> list[bool]:
        """Return which layers there is time to renew: those that have changed most, until one costs too much.

        The layers behind that one wait too, however cheap: otherwise the largest layers would wait for ever. As long as
        the cost of no renewal is known (after the state of another rule) renewals count as free.

        Args:
            changes: By how much each has changed.
            work: The work of renewing it.
            part: The part of the credit that is theirs.
        """
        left, chosen = self.credit * part, [False] * len(changes)
        rate = self.times.renewing / self.times.work if self.times.work else 0.0
        for index in sorted(range(len(changes)), key=lambda index: -changes[index]):
            cost = rate * work[index] if work[index] else 0.0
            if cost > left:
                break
            left -= cost
            chosen[index] = True
        return chosen

    def settle(self, step: int) -> None:
        """Capture and renew nothing from `step` on until the steps to come have earned what is overdrawn.

        As long as the time of no step is known, this does nothing.
        """
        if self.credit < 0 and self.times.steps:
            wait = ceil(-self.credit / self.income) if self.income > 0 else _LONGEST
            self.resume = step + min(wait, _LONGEST)

    def state_dict(self) -> dict[str, float]:
        """Return the account as plain numbers."""
        return {**asdict(self.times), "resume": self.resume}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self.times = StepTimes(**{field.name: float(state[field.name]) for field in fields(StepTimes)})
        self.resume = int(state["resume"])
