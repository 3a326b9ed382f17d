"""Autopilot: damping chosen from measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, inf, isfinite, log
from statistics import quantiles

from typing_extensions import override

from natgrad.damping.adaptive import Adaptation, Adaptive, Extent, Outcome
from natgrad.schedule import check_number

# The lr² / κ that `share` refers to (a learning rate of 1 and a KL clip of 1e-3), and the smallest value that counts,
# in units of it: smaller ones have not been measured.
_PACE, _SLOWEST = 1e3, 1e-4
# γ is proportional to this power of lr² / κ. The power 1/2 would keep lr / γ, the step per gradient in directions
# without curvature, constant.
_POWER = 0.375
# γ before the first statistics, which is not used.
_UNKNOWN = 1e-3
# Layers whose Fisher is a smaller part of the largest are left out: those behind a layer of zeros.
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Autopilot(Adaptive):
    """Chooses γ once, from the size of the Fisher and the norm of the parameters.

    γ is computed after the first statistics, before their first use, and then stays constant:

        γ = min(share · (lr² / 1000 κ)^(3/8) · q, κ / (c (stride ‖θ‖)²)),  c = ‖∇‖² / tr F

    q is the lower quartile, on a logarithmic scale, of the layers' mean eigenvalues ``tr F_l / d_l`` with d_l
    parameters each; ‖θ‖ is the norm of all parameters with curvature; ∇ is the gradient of the mean loss; κ is the KL
    clip. lr is the largest learning rate of layers with curvature: the present rate or the one that a scheduler starts
    from (``initial_lr``, ``max_lr``), whichever is larger. lr² / κ counts as at least 0.1.

    The second bound: with ``γ ‖V‖² ≤ ⟨V, ∇⟩`` and the clip ``lr² ν² ⟨V, ∇⟩ ≤ κ`` no gradient moves the parameters by
    more than ``sqrt(κ / γ)``. The bound lets this be at least ``stride ‖θ‖ sqrt(c)``; more damping would only slow down
    directions of low curvature. c measures how much the samples agree about the gradient: 1 if all have the same one,
    1 / m for m samples of noise. If the KL clip is not a number, γ is ``share · q``.

    A loss n times as large has n² times the Fisher, so the natural gradients do not depend on its unit. Measurements:
    docs/measurements.md.

    Attributes:
        share: The first bound of γ in units of q, at a learning rate of 1 and a KL clip of 1e-3; above 0.
        stride: The part of ‖θ‖ that a gradient may move the parameters by if c is 1; above 0.

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
    """The state of the rule in one training."""

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
