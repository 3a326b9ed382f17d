"""Damping by the reduction ratio (Levenberg-Marquardt; Martens & Grosse 2015, section 6.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isnan, nan

from typing_extensions import override

from natgrad.damping.adaptive import Adaptation, AdaptiveDamping, StepOutcome
from natgrad.errors import require
from natgrad.schedule import check_number, check_whole

_GOOD, _BAD = 3 / 4, 1 / 4


@dataclass(frozen=True)
class LevenbergMarquardt(AdaptiveDamping):
    """Decreases γ if the quadratic model predicts the change of the loss well, and increases it otherwise.

    Every `interval` steps the loss of the mini-batch is computed before and after the optimizer's step δ, including
    learning rate, momentum and weight decay. Its change is compared with ``M(δ) = ∇ᵀδ + ½ δᵀ(F + γI)δ``:

        ρ = (L(θ + δ) - L(θ)) / M(δ),   γ ← γ decayⁱⁿᵗᵉʳᵛᵃˡ if ρ > 3/4,   γ ← γ / decayⁱⁿᵗᵉʳᵛᵃˡ if ρ < 1/4.

    F consists of the layers' curvatures in that step, and is 0 for parameters without curvature. If the loss is nan, ρ
    is -∞. If M predicts an increase (by momentum), ρ is ``1 - (L(θ + δ) - L(θ) - M(δ)) / |M(δ)|``.

    It requires ``preconditioner.step(closure)``. The closure returns the loss of the same batch, without a backward
    pass. It is called twice in each compared step, with the random numbers of the first pass.

    Attributes:
        start: The initial γ, above 0.
        interval: Steps between two comparisons.
        decay: ω, the factor per step by which γ may change, in (0, 1).
        bounds: The smallest and the largest γ.

    Raises:
        ValueError: if an option is not allowed.
    """

    compares = True

    start: float
    interval: int = 5
    decay: float = 19 / 20
    bounds: tuple[float, float] = (1e-8, 1e8)

    def __post_init__(self) -> None:
        """Check the options."""
        check_whole("interval", self.interval, 1)
        check_number("decay", self.decay, "a number in (0, 1)", minimum=0, strict=True)
        require(self.decay < 1, "decay", self.decay, "a number in (0, 1)")
        pair = isinstance(self.bounds, tuple) and len(self.bounds) == 2
        require(pair, "bounds", self.bounds, "a pair of numbers")
        for bound in self.bounds:
            check_number("bounds", bound, "a pair of numbers > 0", minimum=0, strict=True)
        least, greatest = self.bounds
        require(least <= greatest, "bounds", self.bounds, "the least and the greatest γ")
        check_number("start", self.start, "a number > 0", minimum=0, strict=True)
        require(least <= self.start <= greatest, "start", self.start, f"within bounds={self.bounds}")

    @override
    def begin(self) -> _Search:
        return _Search(self)


class _Search(Adaptation):
    """The state of the rule in one training."""

    def __init__(self, options: LevenbergMarquardt) -> None:
        self._options = options
        self.gamma, self._ratio = options.start, nan

    def tries(self, step: int) -> bool:
        return step % self._options.interval == 0

    def learn(self, outcome: StepOutcome) -> None:
        ratio = self._ratio = -inf if isnan(outcome.change) else outcome.ratio
        factor: float = self._options.decay**self._options.interval
        if ratio > _GOOD:
            self.gamma *= factor
        elif ratio < _BAD:
            self.gamma /= factor
        least, greatest = self._options.bounds
        self.gamma = min(max(self.gamma, least), greatest)

    def metrics(self) -> dict[str, float]:
        return {"reduction_ratio": self._ratio}

    def state_dict(self) -> dict[str, float]:
        return {"gamma": self.gamma}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.gamma = float(state["gamma"])
