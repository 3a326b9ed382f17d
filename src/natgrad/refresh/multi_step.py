"""Intervals that are multiplied at given steps (Pauloski 2022, section 5.3)."""

from __future__ import annotations

from dataclasses import dataclass

from natgrad.errors import require
from natgrad.schedule import check_number


@dataclass(frozen=True)
class MultiStepInterval:
    """The interval, times `factor` for each of `steps` that has passed: the frequency of updates decays.

    Running averages become more stable as training goes on, so that they are decomposed less often.

    Attributes:
        interval: The first interval.
        steps: After how many completed steps it is multiplied, rising.
        factor: By what.

    Raises:
        ValueError: if `interval` or `factor` is below 1, or `steps` are no rising whole numbers.
    """

    interval: float
    steps: tuple[int, ...]
    factor: float = 2.0

    def __post_init__(self) -> None:
        """Check the numbers, and take any sequence of steps."""
        check_number("interval", self.interval, "a number of steps >= 1", minimum=1)
        check_number("factor", self.factor, "a number >= 1", minimum=1)
        fits = isinstance(self.steps, (list, tuple)) and all(type(step) is int and step >= 0 for step in self.steps)
        fits = fits and all(one < other for one, other in zip(self.steps, self.steps[1:], strict=False))
        require(fits, "steps", self.steps, "rising whole numbers")
        object.__setattr__(self, "steps", tuple(self.steps))

    def __call__(self, step: int) -> float:
        """Return the interval after `step` completed steps."""
        return self.interval * self.factor ** sum(step >= passed for passed in self.steps)
