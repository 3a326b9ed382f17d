"""Criteria that choose layers when decompositions are due: `natgrad.TraceRule`, `DriftRule`, `BasisRule`."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from typing_extensions import override

from natgrad.errors import require
from natgrad.refresh.rule import RefreshRule, Verdict
from natgrad.schedule import check_number


@dataclass(frozen=True, kw_only=True)
class TraceRule(RefreshRule):
    """Decompose a layer by the relative change of the trace of its damped Fisher block since its last check.

    ``Δ = |tr(F_k + λI) - tr(F_{k-1} + λI)| / tr(F_{k-1} + λI)``, where k counts the checks of the layer. If Δ is above
    `upper`, the layer is decomposed; if it is below `lower`, the layer is stopped: it is no longer captured or sent
    either. Otherwise, and if tr F has not changed at all (for example without a capture since the last check), the
    layer keeps its decompositions until the next check.

    For K-FAC ``tr(F + λI) = tr A · tr G + λ d_A d_G``. F is computed from running averages; in the source, which
    ``factor_decay=0`` reproduces, from one batch.

    Source: Chen 2021 (THOR).

    Attributes:
        upper: ω₁.
        lower: ω₂. 0: no layer is stopped.

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
        return value if isfinite(value) else last  # of every check, also if the layer is not refreshed


@dataclass(frozen=True)
class DriftRule(RefreshRule):
    """Decompose a layer or a factor X if ``‖X_t - X_last‖ / ‖X_last‖ >= threshold``.

    X_last is the running average at the last decomposition; norms are Frobenius norms. The workers of a layer store a
    second copy of its factors. With ``by="layer"`` one factor is enough for the whole layer.

    Source: Osawa 2019, eq. 21.

    Attributes:
        threshold: The smallest relative change that causes a decomposition.

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
    """Decompose a layer or a factor X if ``‖offdiag(Qᵀ X Q)‖ / ‖X‖ >= tolerance``.

    Q are the eigenvectors of the last decomposition, and norms are Frobenius norms. The off-diagonal part is the error
    of the eigenbasis. Changes of eigenvalues in the same eigenbasis do not count; use `DriftRule` or `TraceRule` for
    these.
    Cost: two matrix products for each factor. Layers without eigenvectors are always decomposed when due.

    Attributes:
        tolerance: The smallest relative off-diagonal part that causes a decomposition.

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
