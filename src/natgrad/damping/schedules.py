"""Schedules: functions of the number of completed steps.

They can be used for the damping and for the intervals of `natgrad.Refresh`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from math import cos, log10, pi

from natgrad.errors import require, with_suggestions
from natgrad.schedule import check_number, check_whole, is_whole


@with_suggestions
@dataclass(frozen=True)
class _Way(ABC):
    """A transition from one value to another.

    Attributes:
        start: The value before the first step, above 0.
        target: The final value, above 0.
        steps: The number of steps of the transition.

    Raises:
        ValueError: if a value is not above 0, or `steps` is below 1.
    """

    start: float
    target: float
    steps: int

    def __post_init__(self) -> None:
        for name in ("start", "target"):
            check_number(name, getattr(self, name), "a number > 0", minimum=0, strict=True)
        check_whole("steps", self.steps, 1)

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the value after `step` completed steps."""

    def _done(self, step: int) -> float:
        """Return the completed fraction of the transition, 1 from step `steps` on."""
        return min(step / self.steps, 1.0)


class Linear(_Way):
    """Change linearly to `target`, and stay there."""

    def __call__(self, step: int) -> float:
        """Return the value after `step` completed steps: ``start + (target - start) step / steps``."""
        done = self._done(step)
        return self.start * (1 - done) + self.target * done


class Exponential(_Way):
    """Change by equal ratios to `target`, and stay there."""

    def __call__(self, step: int) -> float:
        """Return the value after `step` completed steps: ``start (target / start)^(step / steps)``."""
        done = self._done(step)
        value: float = self.start ** (1 - done) * self.target**done
        return value


class Cosine(_Way):
    """Change along half a cosine wave to `target`, and stay there."""

    def __call__(self, step: int) -> float:
        """Return the value after `step` completed steps: `start` has the weight ``(1 + cos(π step / steps)) / 2``."""
        left = (1 + cos(pi * self._done(step))) / 2
        return self.start * left + self.target * (1 - left)


class WarmUp(_Way):
    """Approach `target` exponentially (warm-up damping).

    ``γ_{t+1} = (1 - α) γ_t + α γ_target`` with ``α = 2 log10(γ_0 / γ_target) / steps``, in closed form
    ``γ_t = γ_target + (γ_0 - γ_target) (1 - α)ᵗ``. γ does not reach the target after `steps`: with the paper's values
    it is then 2.35 to 2.77 times the target.

    Source: Osawa 2019 (SP-NGD), section 4.3, eq. 16.

    Raises:
        ValueError: if a value is not above 0, `start` is not above `target`, or `steps` is so small that α is above 1.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.start > self.target, "start", self.start, f"above target={self.target:g}")
        least = 2 * log10(self.start / self.target)
        require(self.steps >= least, "steps", self.steps, f"at least 2 log10(start / target) = {least:g}")

    def __call__(self, step: int) -> float:
        """Return γ after `step` completed steps."""
        rate = 2 * log10(self.start / self.target) / self.steps
        kept: float = (1 - rate) ** step
        return self.target + (self.start - self.target) * kept


class Piecewise:
    """Change at some steps and stay constant in between: ``Piecewise({0: 0.1, 1000: 0.01})``."""

    @with_suggestions
    def __init__(self, values: Mapping[int, float]) -> None:
        """Check the values.

        Args:
            values: The values above 0, by the step from which they apply; step 0 is required.

        Raises:
            ValueError: if step 0 is missing, a step is not a whole number, or a value is not above 0.
        """
        fits = isinstance(values, Mapping) and 0 in values
        require(fits, "values", values, "a mapping of steps to values, with one for step 0")
        for step, value in values.items():
            require(is_whole(step) and step >= 0, "values", step, "a mapping whose keys are steps, whole numbers >= 0")
            check_number(f"values[{step}]", value, "a number > 0", minimum=0, strict=True)
        self.values = dict(sorted(values.items()))

    def __repr__(self) -> str:
        return f"Piecewise({self.values!r})"

    def __call__(self, step: int) -> float:
        """Return the value after `step` completed steps."""
        steps = list(self.values)
        return self.values[steps[bisect_right(steps, step) - 1]]
