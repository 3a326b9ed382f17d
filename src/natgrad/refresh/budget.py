"""The account of a clock with a cap: what preconditioning may take, what it has taken, what a renewal would."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from math import ceil
from statistics import median_low

# Nothing waits for longer, even where solves alone take more than the share.
_LONGEST = 1000
# A step counts for no more than so many times the median of so many before it.
_MOST, _WINDOW = 5, 31


@dataclass
class Times:
    """Seconds of some steps, of one rank or summed over ranks.

    Attributes:
        steps: How many of them are known from end to end, times the ranks.
        elapsed: From the end of one step to that of the next, without pauses (`Pace`).
        spent: On preconditioning.
        fixed: What of it each of these takes, renewals or not: solves and their messages.
        renewing: What of it decompositions took, with the exchange of their results.
        work: What these have renewed, in the unit of `natgrad.placement.Plan.weights`.
        aside: What of `spent` has passed beside the steps, which did not wait for it.
    """

    steps: float = 0.0
    elapsed: float = 0.0
    spent: float = 0.0
    fixed: float = 0.0
    renewing: float = 0.0
    work: float = 0.0
    aside: float = 0.0

    def add(self, numbers: Sequence[float]) -> None:
        """Add those of other steps or ranks, in the order of the fields."""
        for each, number in zip(fields(self), numbers, strict=True):
            setattr(self, each.name, getattr(self, each.name) + number)

    def numbers(self) -> list[float]:
        """Return all in the order of the fields."""
        return list(astuple(self))


class Pace:
    """How long the steps of one rank take without preconditioning, pauses between them left out.

    An evaluation, a checkpoint or a debugger that holds the process is no time of training, of which preconditioning
    may take a share. It shows in the time from one step to the next alone, so a step that takes more than five times
    the median of the last ones counts as five times that. Where steps become longer for good, the median follows once
    half of its window has seen it.
    """

    def __init__(self) -> None:
        """Begin with no step seen."""
        self._seen: deque[float] = deque(maxlen=_WINDOW)

    def count(self, seconds: float) -> float:
        """Return what of the `seconds` of a step counts.

        The first counts whole; where the second shows that there was a pause in it, that is taken back.
        """
        self._seen.append(seconds)
        most = _MOST * median_low(self._seen)
        back = max(0.0, self._seen[0] - most) if len(self._seen) == 2 else 0.0
        return min(seconds, most) - back


class Budget:
    """Preconditioning earns `share` of the time that passes, and spends what it takes; all in seconds.

    Attributes:
        share: Of the time.
        times: What has been heard, summed over the ranks: the same on all of them.
        resume: The step before which nothing is captured or renewed.
    """

    def __init__(self, share: float) -> None:
        """Open the account."""
        self.share, self.times, self.resume = share, Times(), 0

    @property
    def numbers(self) -> int:
        """How many numbers ranks tell each other of their time."""
        return len(fields(Times))

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
        """Tell which of some layers there is time to renew: those that have changed most, until one is too much.

        What comes behind it waits too, however little it is: else the largest layers would wait for ever. As long as
        no renewal was heard of (after the state of another clock) they count as free: the first will tell.

        Args:
            changes: By how much each has changed.
            work: The work of renewing it.
            part: The part of the credit that is theirs.
        """
        times, left, chosen = self.times, self.credit * part, [False] * len(changes)
        rate = times.renewing / times.work if times.work else 0.0
        for index in sorted(range(len(changes)), key=lambda index: -changes[index]):
            cost = rate * work[index] if work[index] else 0.0
            if cost > left:
                break
            left -= cost
            chosen[index] = True
        return chosen

    def settle(self, step: int) -> None:
        """Have nothing happen from `step` on until the steps to come have earned what is overdrawn.

        As long as no step is known, nobody knows when that will be.
        """
        if self.credit < 0 and self.times.steps:
            wait = ceil(-self.credit / self.income) if self.income > 0 else _LONGEST
            self.resume = step + min(wait, _LONGEST)

    def state_dict(self) -> dict[str, float]:
        """Return what a training that resumes goes on from."""
        return {**asdict(self.times), "resume": self.resume}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self.times = Times(**{each.name: float(state[each.name]) for each in fields(Times)})
        self.resume = int(state["resume"])
