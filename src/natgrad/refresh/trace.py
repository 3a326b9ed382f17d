"""THOR's rule: a layer is renewed by how much the trace of its Fisher block has changed (Chen 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import ClassVar

from typing_extensions import override

from natgrad.errors import require
from natgrad.refresh.rule import Measure, Rule, Verdict
from natgrad.schedule import check_number


@dataclass(frozen=True, kw_only=True)
class TraceRule(Rule):
    """``Δ = |tr(F_k + λI) - tr(F_{k-1} + λI)| / tr(F_{k-1} + λI)``, k counting the checks of a layer.

    Above `upper` it is renewed, between the two it keeps what it has, and below `lower` it does so for good: it is
    neither captured, nor sent, nor decomposed any more. Where tr F has not changed at all, as where nothing was
    captured since the last check (a step that a ``GradScaler`` left out, a longer interval of factors, a layer that was
    not used), it is kept for now, whatever a scheduled λ has done to Δ.

    For K-FAC ``tr(F + λI) = tr A · tr G + λ d_A d_G``. F is made of the running averages, as what is decomposed is;
    with ``factor_decay=0`` they are THOR's, of one batch.

    Attributes:
        upper: ω₁.
        lower: ω₂; 0: no layer is ever stopped.

    Raises:
        ValueError: unless 0 <= lower <= upper, and upper > 0.
    """

    upper: float = 0.01
    lower: float = 0.001

    measure: ClassVar[Measure] = "trace"

    def __post_init__(self) -> None:
        """Check the bounds."""
        check_number("upper", self.upper, "a number > 0", minimum=0, strict=True)
        check_number("lower", self.lower, "a number >= 0", minimum=0)
        require(self.lower <= self.upper, "lower", self.lower, f"at most upper={self.upper}")

    @property
    def stops(self) -> bool:  # type: ignore[override]
        """See `Rule.stops`: with `lower` above 0."""
        return self.lower > 0

    def change(self, value: float, last: float | None) -> float:
        """See `Rule.change`: Δ."""
        return relative(value, last)

    @override
    def verdict(self, change: float) -> Verdict:
        if 0 < change < self.lower:
            return "stop"
        return "renew" if change > self.upper else "keep"

    def remember(self, value: float, last: float | None, *, renewed: bool) -> float | None:
        """See `Rule.remember`: the trace of every check, be the layer renewed or not."""
        return value if isfinite(value) else last


def relative(value: float, last: float | None) -> float:
    """Return ``|value - last| / |last|``; infinite where there is nothing to compare, or it is no number."""
    if last is None or last == 0 or not (isfinite(value) and isfinite(last)):
        return inf
    return abs(value - last) / abs(last)
