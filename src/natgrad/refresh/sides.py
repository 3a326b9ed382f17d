"""A clock for what is of a layer's inputs, another for what needs gradients."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

from natgrad.schedule import Schedule, check_schedule, value_at

# What a statistic is of.
Side: TypeAlias = Literal["inputs", "gradients"]
# What a part of a renewal reads.
Reads: TypeAlias = Literal["inputs", "gradients", "both"]

SIDES: tuple[Side, ...] = ("inputs", "gradients")
READS: tuple[Reads, ...] = (*SIDES, "both")

_ALLOWED = "a number of steps >= 1"


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Intervals of their own for A and G: "the factor A fluctuates less than G" (Osawa 2019, section 5.4).

    Attributes:
        inputs: Of the statistics that a curvature has from a layer's inputs alone (`Curvature.early`: A of K-FAC) and
            of what is made of these alone: a number of steps, or a callable of the step.
        gradients: Of all others.

    Raises:
        ValueError: if an interval is below 1.
    """

    inputs: Schedule
    gradients: Schedule

    def __post_init__(self) -> None:
        """Check both intervals."""
        for side in SIDES:
            check_schedule(side, getattr(self, side), _ALLOWED, minimum=1)


def interval(name: str, given: Schedule | Sides, reads: Reads, step: int) -> float:
    """Return an interval after `step` completed steps; what reads both sides follows the shorter one.

    Raises:
        ValueError: if a callable returns what is no interval.
    """
    if not isinstance(given, Sides):
        return value_at(name, given, step, _ALLOWED, minimum=1)
    own = {side: value_at(f"{name}.{side}", getattr(given, side), step, _ALLOWED, minimum=1) for side in SIDES}
    return min(own.values()) if reads == "both" else own[reads]


def mean_interval(name: str, given: Schedule | Sides, step: int) -> float:
    """Return the interval at which as much would be done, if both sides cost the same."""
    both = [interval(name, given, side, step) for side in SIDES]
    return len(both) / sum(1 / each for each in both)


def side_of(names: Collection[str], early: Collection[str]) -> Reads:
    """Tell which side some statistics are of.

    Args:
        names: Theirs.
        early: `Curvature.early`.
    """
    if names and all(name in early for name in names):
        return "inputs"
    return "both" if any(name in early for name in names) else "gradients"
