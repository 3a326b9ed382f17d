"""The limit on the time of preconditioning, and the choice of refreshes within it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from math import ceil
from statistics import median_low

# The largest number of steps without captures and refreshes.
_LONGEST = 1000
# The time of a step counts as at most _MOST times the median of the last _WINDOW steps.
_MOST, _WINDOW = 5, 31


@dataclass
class StepTimes:
    """Host seconds of some steps, of one rank or summed over ranks. The names of the fields are keys of checkpoints.

    Attributes:
        steps: The number of steps whose time is known, times the number of ranks.
        elapsed: The seconds from the end of each step to that of the next, without pauses (`PauseFilter`).
        spent: The seconds of preconditioning.
        fixed: The part of `spent` that every step takes: solves and their messages.
        renewing: The part of `spent` for decompositions and the exchange of their results.
        work: The work of these decompositions, in the unit of `natgrad.distributed.Plan.weights`.
        aside: The part of `spent` in the background, for which steps did not wait.
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
    """Excludes pauses between steps, such as evaluations and checkpoints, from the time of training.

    A step that takes more than five times the median of the last 31 steps counts as five times the median. If steps
    become longer permanently, the median follows after half of these steps.
    """

    def __init__(self) -> None:
        """Initialize without steps."""
        self._last: deque[float] = deque(maxlen=_WINDOW)

    def training_seconds(self, seconds: float) -> float:
        """Return the part of the `seconds` of a step that counts.

        The first step counts in full; a pause in it is subtracted from the second.
        """
        self._last.append(seconds)
        most = _MOST * median_low(self._last)
        correction = max(0.0, self._last[0] - most) if len(self._last) == 2 else 0.0
        return min(seconds, most) - correction


class Budget:
    """The time that preconditioning may take: `share` of the elapsed time.

    Attributes:
        share: The allowed fraction of the elapsed time.
        times: The times so far, summed over the ranks, equal on all of them.
        resume: The step before which nothing is captured or refreshed.
    """

    def __init__(self, share: float) -> None:
        """Initialize without times."""
        self.share, self.times, self.resume = share, StepTimes(), 0

    @property
    def credit(self) -> float:
        """The seconds that preconditioning may take now; negative if it has taken too many."""
        return self.share * self.times.elapsed - self.times.spent

    @property
    def taken(self) -> float:
        """The fraction of the elapsed time that preconditioning has taken."""
        return self.times.spent / self.times.elapsed if self.times.elapsed else 0.0

    @property
    def income(self) -> float:
        """The seconds by which a step without capture and refresh increases `credit`."""
        times = self.times
        if not times.steps:
            return 0.0
        fixed = times.fixed / times.steps
        training = (times.elapsed - times.spent + times.aside) / times.steps
        return self.share * (training + fixed) - fixed

    def choose(self, changes: Sequence[float], work: Sequence[float], part: float = 1.0) -> list[bool]:
        """Return for each layer whether to refresh it: those that have changed most, until one costs more than is left.

        The following layers wait too, even if they cost less, so that large layers are refreshed eventually. Refreshes
        count as free while their cost is unknown (after loading the state of another rule).

        Args:
            changes: The change of each layer.
            work: The work of refreshing each layer.
            part: The fraction of the credit for these layers.
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
        """Set `resume` to the step before which a negative credit is balanced; do nothing while times are unknown."""
        if self.credit < 0 and self.times.steps:
            wait = ceil(-self.credit / self.income) if self.income > 0 else _LONGEST
            self.resume = step + min(wait, _LONGEST)

    def state_dict(self) -> dict[str, float]:
        """Return the times and `resume` as plain numbers."""
        return {**asdict(self.times), "resume": self.resume}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self.times = StepTimes(**{field.name: float(state[field.name]) for field in fields(StepTimes)})
        self.resume = int(state["resume"])
