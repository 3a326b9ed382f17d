"""Intervals at which a rule decides, layer by layer or factor by factor."""

from __future__ import annotations

from dataclasses import dataclass, field

from typing_extensions import override

from natgrad.errors import require, require_one_of
from natgrad.refresh.base import Clock
from natgrad.refresh.rule import OF_FACTORS, By, Rule
from natgrad.refresh.sides import Reads, Side
from natgrad.schedule import Schedule, check_schedule, value_at

_ALLOWED = "a number of steps >= 1"


@dataclass(frozen=True)
class Adaptive(Clock):
    """Renew the layers or factors that a rule chooses, at steps where renewals are due; the first time all of them.

    Attributes:
        rule: `natgrad.TraceRule`, `natgrad.DriftRule`, `natgrad.BasisRule`, or one of your own.
        by: "layer": a layer is renewed as a whole, by the factor that has changed most. "factor": each factor by
            itself, but that those which are decomposed of one another's statistics go together, as both inverses of
            K-FAC, whose damping is balanced by both traces; for rules that measure factors.
        factors: Steps between two captures of statistics: a number, or a callable of the step.
        inverses: Steps between two decisions: likewise.

    Raises:
        ValueError: if `rule` is none, or one of layers alone by "factor", or an interval is below 1.
    """

    rule: Rule
    by: By = field(default="layer", kw_only=True)
    factors: Schedule = field(default=1, kw_only=True)
    inverses: Schedule = field(default=10, kw_only=True)

    def __post_init__(self) -> None:
        """Check the rule and both intervals."""
        require(isinstance(self.rule, Rule), "rule", self.rule, "a rule such as natgrad.TraceRule()")
        require_one_of("by", self.by, "layer", "factor")
        fits = self.by == "layer" or self.rule.measure in OF_FACTORS
        require(fits, "by", self.by, f"'layer' with {self.rule!r}, which measures no factor by itself")
        for name in ("factors", "inverses"):
            check_schedule(name, getattr(self, name), _ALLOWED, minimum=1)

    @override
    def factor_interval(self, step: int, side: Side = "gradients") -> float:
        return value_at("factors", self.factors, step, _ALLOWED, minimum=1)

    @override
    def inverse_interval(self, step: int, reads: Reads = "both") -> float:
        return value_at("inverses", self.inverses, step, _ALLOWED, minimum=1)

    def intervals(self, step: int) -> dict[str, float]:
        """See `Clock.intervals`: as if the rule always renewed."""
        return {"factors": self.factor_interval(step), "inverses": self.inverse_interval(step)}

    @override
    def settings(self, step: int) -> object:
        return repr(self.rule), self.by, self.intervals(step)
