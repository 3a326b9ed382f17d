"""A factor is decomposed anew when it has moved far enough (the measure of Osawa 2019, eq. 21)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import ClassVar

from typing_extensions import override

from natgrad.refresh.rule import Measure, Rule, Verdict
from natgrad.schedule import check_number


@dataclass(frozen=True)
class DriftRule(Rule):
    """Renew a layer, or what reads a factor X of it, where ``‖X_t - X_last‖ / ‖X_last‖ >= threshold``.

    X_last is the running average that its last renewal was made of, in the Frobenius norm. It is kept: memory for the
    factors once more, on the ranks that hold what is made of them. A layer goes by the factor that has moved most.

    Attributes:
        threshold: How far; about what one batch in twenty adds to a running average is 0.1.

    Raises:
        ValueError: unless `threshold` is a number > 0.
    """

    threshold: float = 0.1

    measure: ClassVar[Measure] = "drift"

    def __post_init__(self) -> None:
        """Check the threshold."""
        check_number("threshold", self.threshold, "a number > 0", minimum=0, strict=True)

    def change(self, value: float, last: float | None) -> float:
        """See `Rule.change`: what is measured."""
        return value if isfinite(value) else inf

    @override
    def verdict(self, change: float) -> Verdict:
        return "renew" if change >= self.threshold else "keep"
