"""Rules that choose layers when decompositions are due: `natgrad.TraceRule` and `natgrad.DriftRule`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from typing_extensions import override

from natgrad.refresh.rule import Candidate, RefreshRule
from natgrad.schedule import check_number


@dataclass(frozen=True, kw_only=True)
class TraceRule(RefreshRule):
    """Decompose a layer if the trace of its damped Fisher block has changed by more than `upper` since its last check.

    ``Δ = |tr(F_k + λI) - tr(F_{k-1} + λI)| / tr(F_{k-1} + λI)``, where k counts the checks of the layer.

    For K-FAC ``tr(F + λI) = tr A · tr G + λ d_A d_G``. F is computed from running averages; in the source, which
    ``factor_decay=0`` reproduces, from one batch.

    Source: Chen 2021 (THOR).

    Attributes:
        upper: ω₁.

    Raises:
        ValueError: unless `upper` is a number > 0.
    """

    upper: float = 0.01

    measure = "trace"

    def __post_init__(self) -> None:
        """Check the bound."""
        check_number("upper", self.upper, "a number > 0", minimum=0, strict=True)

    @override
    def due(self, step: int, candidates: Sequence[Candidate]) -> Collection[str]:
        return {candidate.layer for candidate in candidates if candidate.change > self.upper}


@dataclass(frozen=True)
class DriftRule(RefreshRule):
    """Decompose a layer if ``‖X_t - X_last‖ / ‖X_last‖ >= threshold`` for one of its factors X.

    X_last is the running average at the last decomposition; norms are Frobenius norms. The workers of a layer store a
    second copy of its factors.

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
    def due(self, step: int, candidates: Sequence[Candidate]) -> Collection[str]:
        return {candidate.layer for candidate in candidates if candidate.change >= self.threshold}
