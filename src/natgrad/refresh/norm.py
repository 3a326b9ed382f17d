"""What tells layers apart where no rule does: how much the norms of their statistics have changed."""

from __future__ import annotations

from math import isfinite
from typing import ClassVar

from typing_extensions import override

from natgrad.refresh.rule import Measure, Rule, Verdict
from natgrad.refresh.trace import relative


class NormRule(Rule):
    """Renew always, those first whose norm has changed most since their last renewal.

    The norm is a product over the statistics, as of a Kronecker product. By the triangle inequality its relative change
    is a lower bound of that of the factors; it takes one number of memory a layer, and next to no time.
    """

    measure: ClassVar[Measure] = "norm"

    @override
    def change(self, value: float, last: float | None) -> float:
        return relative(value, last)

    @override
    def verdict(self, change: float) -> Verdict:
        return "renew"

    def remember(self, value: float, last: float | None, *, renewed: bool) -> float | None:
        """See `Rule.remember`: the norm at the last renewal."""
        return value if renewed and isfinite(value) else last
