"""Fixed or scheduled intervals."""

from __future__ import annotations

from dataclasses import dataclass

from natgrad.schedule import Schedule, check_schedule, value_at

_ALLOWED = "a number of steps >= 1"


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
        check_schedule("factors", self.factors, _ALLOWED, minimum=1)
        check_schedule("inverses", self.inverses, _ALLOWED, minimum=1)

    def check(self, step: int) -> None:
        """Check what the step after `step` completed ones will read, before it changes anything.

        Raises:
            ValueError: if a callable returns what is no interval.
        """
        self.factors_due(step + 1, None)
        self.inverses_due(step, None)

    def intervals(self, step: int) -> dict[str, float]:
        """Return both intervals after `step` completed steps.

        Raises:
            ValueError: if a callable returns what is no interval.
        """
        return {
            name: value_at(name, getattr(self, name), step, _ALLOWED, minimum=1) for name in ("factors", "inverses")
        }

    def factors_due(self, step: int, last: int | None) -> bool:
        """Tell whether the step after `step` completed ones captures statistics, the last such step being `last`."""
        return _due("factors", self.factors, step, last)

    def inverses_due(self, step: int, last: int | None) -> bool:
        """Tell whether the step after `step` completed ones decomposes, the last such step being `last`."""
        return _due("inverses", self.inverses, step, last)


def _due(name: str, interval: Schedule, step: int, last: int | None) -> bool:
    steps = value_at(name, interval, step, _ALLOWED, minimum=1)
    return last is None or step - last >= steps
