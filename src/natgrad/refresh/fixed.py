"""Fixed or scheduled intervals."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from natgrad.refresh.base import Clock
from natgrad.refresh.sides import Reads, Side, Sides, interval, mean_interval
from natgrad.schedule import Schedule, check_schedule

_ALLOWED = "a number of steps >= 1, or natgrad.Sides"


@dataclass(frozen=True, kw_only=True)
class Refresh(Clock):
    """Renew at intervals counted in completed steps (stale curvature: Pauloski 2022, section 4.3).

    Something is due when ``step - last >= interval``; what was never renewed is due at once.

    Attributes:
        factors: Steps between two captures of the statistics that are accumulated (A, G): a number, a callable of the
            step, or `natgrad.Sides` of these for A and G.
        inverses: Steps between two decompositions: likewise. What is made of both A and G follows the shorter interval.

    Raises:
        ValueError: if an interval is below 1.
    """

    factors: Schedule | Sides = 1
    inverses: Schedule | Sides = 10

    def __post_init__(self) -> None:
        """Check both intervals."""
        for name, value in vars(self).items():
            if not isinstance(value, Sides):
                check_schedule(name, value, _ALLOWED, minimum=1)

    @property
    @override
    def separate(self) -> bool:  # type: ignore[override]
        return isinstance(self.factors, Sides) or isinstance(self.inverses, Sides)

    @override
    def factor_interval(self, step: int, side: Side = "gradients") -> float:
        return interval("factors", self.factors, side, step)

    @override
    def inverse_interval(self, step: int, reads: Reads = "both") -> float:
        return interval("inverses", self.inverses, reads, step)

    @override
    def intervals(self, step: int) -> dict[str, float]:
        return {name: mean_interval(name, value, step) for name, value in vars(self).items()}
