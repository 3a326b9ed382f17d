"""Criteria by which layers are chosen where decompositions are due: `natgrad.TraceRule`, `DriftRule`, `BasisRule`."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from typing_extensions import override

from natgrad.errors import require
from natgrad.refresh.rule import RefreshRule, Verdict
from natgrad.schedule import check_number


@dataclass(frozen=True, kw_only=True)
class TraceRule(RefreshRule):
    """``Δ = |tr(F_k + λI) - tr(F_{k-1} + λI)| / tr(F_{k-1} + λI)``, k counting the checks of a layer (Chen 2021, THOR).

    Above `upper` a layer is renewed, between the two it keeps what it has, and below `lower` it does so for good: it is
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

    measure = "trace"

    def __post_init__(self) -> None:
        """Check the bounds."""
        check_number("upper", self.upper, "a number > 0", minimum=0, strict=True)
        check_number("lower", self.lower, "a number >= 0", minimum=0)
        require(self.lower <= self.upper, "lower", self.lower, f"at most upper={self.upper}")

    @property
    @override
    def stops(self) -> bool:  # type: ignore[override]
        return self.lower > 0

    @override
    def verdict(self, change: float) -> Verdict:
        if 0 < change < self.lower:
            return "stop"
        return "renew" if change > self.upper else "keep"

    @override
    def remember(self, value: float, last: float | None, *, renewed: bool) -> float | None:
        return value if isfinite(value) else last  # of every check, whether the layer is renewed or not


@dataclass(frozen=True)
class DriftRule(RefreshRule):
    """Renew a layer, or what reads a factor X of it, where ``‖X_t - X_last‖ / ‖X_last‖ >= threshold`` (Osawa 2019, 21).

    X_last is the running average that its last renewal was made of, in the Frobenius norm. It is kept: memory for the
    factors once more, on the ranks that hold what is made of them. A layer goes by the factor that has moved most.

    Attributes:
        threshold: How far; about what one batch in twenty adds to a running average is 0.1.

    Raises:
        ValueError: unless `threshold` is a number > 0.
    """

    threshold: float = 0.1

    measure = "drift"

    def __post_init__(self) -> None:
        """Check the threshold."""
        check_number("threshold", self.threshold, "a number > 0", minimum=0, strict=True)

    @override
    def verdict(self, change: float) -> Verdict:
        return "renew" if change >= self.threshold else "keep"


@dataclass(frozen=True)
class BasisRule(RefreshRule):
    """Renew a layer, or what reads a factor X of it, where ``‖offdiag(Qᵀ X Q)‖ / ‖X‖ >= tolerance``, Q being held.

    The off-diagonal part is what the eigen form leaves out when it takes Q for eigenvectors. It is summed up directly,
    in the Frobenius norm: a difference of squares would cancel. Eigenvalues that moved in an unmoved basis do not
    count; `DriftRule` and `TraceRule` see them. It costs two products of matrices a factor. What has no eigenvectors
    is renewed where due.

    Attributes:
        tolerance: The share that may be left out.

    Raises:
        ValueError: unless `tolerance` is a number > 0.
    """

    tolerance: float = 0.1

    measure = "basis"

    def __post_init__(self) -> None:
        """Check the tolerance."""
        check_number("tolerance", self.tolerance, "a number > 0", minimum=0, strict=True)

    @override
    def verdict(self, change: float) -> Verdict:
        return "renew" if change >= self.tolerance else "keep"
