"""Intervals scaled inversely with the ranks, or the global batch (Pauloski 2022, section 6.4.1)."""

from __future__ import annotations

from dataclasses import dataclass

from natgrad.schedule import Schedule, check_number, check_schedule, value_at

_ALLOWED = "a number of steps >= 1"


@dataclass(frozen=True)
class ScaledInterval:
    """``interval · reference / size``, at least 1: as many refreshes an epoch on any number of ranks.

    500 at 64 ranks becomes 2000 at 16 and 125 at 256 (Pauloski 2022, section 6.4.1).

    Attributes:
        interval: The interval that is right for `reference`: a number, or a callable of the step.
        reference: A number of ranks, or of samples in the global batch.
        size: That of this training.

    Raises:
        ValueError: if `interval` is below 1, or a size no number above 0.
    """

    interval: Schedule
    reference: float
    size: float

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_schedule("interval", self.interval, _ALLOWED, minimum=1)
        for name in ("reference", "size"):
            check_number(name, getattr(self, name), "a number > 0", minimum=0, strict=True)

    def __call__(self, step: int) -> float:
        """Return the interval after `step` completed steps."""
        interval = value_at("interval", self.interval, step, _ALLOWED, minimum=1)
        return max(1.0, interval * self.reference / self.size)
