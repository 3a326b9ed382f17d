"""Fixed or scheduled intervals."""

from __future__ import annotations

from dataclasses import dataclass

from natgrad.errors import require
from natgrad.schedule import Schedule, check_schedule, value_at


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """Renew at intervals counted in completed steps (stale curvature: Pauloski 2022, section 5.1).

    Something is due when ``step - last >= interval``; what was never renewed is due at once.

    Attributes:
        factors: Steps between two captures of the statistics that are accumulated (A, G): a number, or a callable of
            the step.
        inverses: Steps between two decompositions: a number, or a callable of the step.

    Raises:
        ValueError: if an interval is below 1.
    """

    factors: Schedule = 1
    inverses: Schedule = 10

    def __post_init__(self) -> None:
        """Check both intervals."""
        check_schedule("factors", self.factors, "a number of steps >= 1", minimum=1)
        check_schedule("inverses", self.inverses, "a number of steps >= 1", minimum=1)

    def factors_due(self, step: int, last: int | None) -> bool:
        """Tell whether the step after `step` completed ones captures statistics, the last such step being `last`."""
        return _due("factors", self.factors, step, last)

    def inverses_due(self, step: int, last: int | None) -> bool:
        """Tell whether the step after `step` completed ones decomposes, the last such step being `last`."""
        return _due("inverses", self.inverses, step, last)


def _due(name: str, interval: Schedule, step: int, last: int | None) -> bool:
    steps = value_at(interval, step)
    require(steps >= 1, name, steps, f"a number of steps >= 1 (at step {step})")
    return last is None or step - last >= steps
