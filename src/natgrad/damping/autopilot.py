"""Damping that nobody has to choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, inf, isfinite, log
from statistics import quantiles

from typing_extensions import override

from natgrad.damping.adaptive import Adaptation, Adaptive, Extent, Outcome
from natgrad.schedule import check_number

# The lr² / κ that `share` is meant for, that of a learning rate of 1 and a KL clip of 1e-3; and the smallest at which
# anything was measured, in units of it.
_PACE, _SLOWEST = 1e3, 1e-4
# γ goes as this power of lr² / κ. The root would keep lr / γ, by which gradients move what has no curvature as long as
# the clip lets them.
_POWER = 0.375
# γ before any curvature was seen, where there is nothing that it could damp.
_UNKNOWN = 1e-3
# Layers whose Fisher is smaller than this share of the largest count for nothing: those behind a layer of zeros.
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Autopilot(Adaptive):
    """γ by the size of the Fisher, or less where less already keeps steps short beside the parameters.

    All is read off at the first renewal, before its first use, and γ is kept from then on:

        γ = min(share · (lr² / 1000 κ)^(3/8) · q, κ / (c (stride ‖θ‖)²)),  c = ‖∇‖² / tr F

    for q the lower quartile, on a logarithmic scale, of the layers' mean eigenvalues ``tr F_l / d_l``, of d_l
    parameters each, ‖θ‖ the length of all parameters with curvature, ∇ the gradient of the mean loss, and κ the KL
    clip. It is the layers of little curvature that need damping; and where lr is small beside what the clip allows,
    steps stay short by themselves, and want less. lr is the largest learning rate of layers with curvature, now or
    where schedulers begin (``initial_lr``, ``max_lr``), whatever warm-up makes of it; a warm-up by hand is not seen
    through. Where lr² / κ is below 0.1, it counts as that.

    As ``γ ‖V‖² ≤ ⟨V, ∇⟩``, of which the clip lets ``lr² ν² ⟨V, ∇⟩ ≤ κ`` through, no gradient moves the parameters by
    more than ``sqrt(κ / γ)``: by ``stride ‖θ‖ sqrt(c)`` where the second holds, however small the Fisher is and
    whatever the learning rate. More damping would only slow down what has little curvature. c tells how far samples
    agree about the gradient: 1 where all have the same, 1 / m where they are m of noise; above 1 the loss knows of more
    than F does. Where the KL clip is no number, γ is ``share · q``.

    So γ means the same however the loss is scaled: one that is n times as large has n² times the Fisher, n times the
    learning rate and n² times the κ of equal steps. It does not follow the Fisher later on, which vanishes as a model
    fits its data; steps would grow without bound. docs/damping.md tells what it reaches on the embedded tasks. Learning
    rate and KL clip remain the user's.

    Attributes:
        share: What γ is at most, in units of q, at a learning rate of 1 and a KL clip of 1e-3; above 0.
        stride: The share of the parameters' length that a gradient may move them by where c is 1, above 0.

    Raises:
        ValueError: if one is not above 0.
    """

    share: float = 150.0
    stride: float = 0.015

    sizes = True

    def __post_init__(self) -> None:
        """Check the options."""
        check_number("share", self.share, "a number > 0", minimum=0, strict=True)
        check_number("stride", self.stride, "a number > 0", minimum=0, strict=True)

    @override
    def begin(self) -> _Sized:
        return _Sized(self)


class _Sized(Adaptation):
    """The rule in one training."""

    def __init__(self, options: Autopilot) -> None:
        self._options, self._known = options, False
        self.gamma = _UNKNOWN

    @property
    def awaits_sizes(self) -> bool:
        return not self._known

    def measure(self, extent: Extent) -> None:
        usable = [size for size in extent.sizes if isfinite(size) and size > 0]
        counted = [size for size in usable if size > _NEGLIGIBLE * max(usable)]
        if not counted or not isfinite(extent.coherence):
            return
        logs = [log(size) for size in counted]
        size = exp(quantiles(logs, method="inclusive")[0] if len(logs) > 1 else logs[0])
        if extent.pace is not None:
            size *= max(extent.pace / _PACE, _SLOWEST) ** _POWER
        length = extent.room / (extent.coherence * self._options.stride**2) if extent.coherence > 0 else inf
        self.gamma, self._known = min(self._options.share * size, length), True

    def learn(self, outcome: Outcome) -> None:
        raise AssertionError("it compares nothing")

    def state_dict(self) -> dict[str, float]:
        return {"gamma": self.gamma, "known": int(self._known)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.gamma, self._known = float(state["gamma"]), bool(state["known"])
