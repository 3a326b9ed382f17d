"""A layer, or one of its factors, is decomposed anew when the eigenvectors held of it no longer make it diagonal."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import ClassVar

from typing_extensions import override

from natgrad.refresh.rule import Measure, Rule, Verdict
from natgrad.schedule import check_number


@dataclass(frozen=True)
class BasisRule(Rule):
    """Renew a layer, or what reads a factor X of it, where ``‖offdiag(Qᵀ X Q)‖ / ‖X‖ >= tolerance``, Q being held.

    The off-diagonal part is what the eigen form leaves out when it takes Q for eigenvectors; it is summed up itself, in
    the Frobenius norm, for a difference of squares would cancel. Eigenvalues that moved in an unmoved basis do not
    count: of them `DriftRule` and `TraceRule` tell. It costs two products of matrices a factor; what has no
    eigenvectors is renewed where due.

    Attributes:
        tolerance: The share that may be left out.

    Raises:
        ValueError: unless `tolerance` is a number in (0, 1].
    """

    tolerance: float = 0.1

    measure: ClassVar[Measure] = "basis"

    def __post_init__(self) -> None:
        """Check the tolerance."""
        check_number("tolerance", self.tolerance, "a number > 0", minimum=0, strict=True)

    def change(self, value: float, last: float | None) -> float:
        """See `Rule.change`: what is measured."""
        return value if isfinite(value) else inf

    @override
    def verdict(self, change: float) -> Verdict:
        return "renew" if change >= self.tolerance else "keep"
