"""Intervals at which a rule decides, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from natgrad.errors import require
from natgrad.refresh.base import Clock
from natgrad.refresh.rule import Rule
from natgrad.refresh.sides import Reads, Side
from natgrad.schedule import Schedule, check_schedule, value_at

_ALLOWED = "a number of steps >= 1"


@dataclass(frozen=True)
class Adaptive(Clock):
    """Renew the layers and factors that a rule chooses, at steps where renewals are due; the first time all of them.

    Attributes:
        rule: `natgrad.TraceRule`, `natgrad.DriftRule`, `natgrad.BasisRule`, or one of your own.
        factors: Steps between two captures of statistics: a number, or a callable of the step.
        inverses: Steps between two decisions: likewise.

    Raises:
        ValueError: if `rule` is none, or an interval is below 1.
    """

    rule: Rule
    factors: Schedule = field(default=1, kw_only=True)
    inverses: Schedule = field(default=10, kw_only=True)

    def __post_init__(self) -> None:
        """Check the rule and both intervals."""
        require(isinstance(self.rule, Rule), "rule", self.rule, "a rule such as natgrad.TraceRule()")
        for name in ("factors", "inverses"):
            check_schedule(name, getattr(self, name), _ALLOWED, minimum=1)

    def factor_interval(self, step: int, side: Side = "gradients") -> float:
        """See `Clock.factor_interval`."""
        return value_at("factors", self.factors, step, _ALLOWED, minimum=1)

    def inverse_interval(self, step: int, reads: Reads = "both") -> float:
        """See `Clock.inverse_interval`."""
        return value_at("inverses", self.inverses, step, _ALLOWED, minimum=1)

    def intervals(self, step: int) -> dict[str, float]:
        """See `Clock.intervals`: as if the rule always renewed."""
        return {"factors": self.factor_interval(step), "inverses": self.inverse_interval(step)}

    def settings(self, step: int) -> object:
        """See `Clock.settings`."""
        return repr(self.rule), self.intervals(step)
