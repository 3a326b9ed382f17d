"""Damping that nobody has to choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite, log

from natgrad.damping.adaptive import Adaptation, Adaptive, Outcome
from natgrad.schedule import check_number

# γ before any curvature was seen, where there is nothing that it could damp.
_UNKNOWN = 1e-3
# Layers whose Fisher is smaller than this share of the largest count for nothing: those behind a layer of zeros.
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Autopilot(Adaptive):
    """γ by the size of the Fisher, or less where less already keeps steps short beside the parameters.

    Both are read off at the first renewal, before its first use, and γ is kept from then on:

        γ = min(share · (Π_l tr F_l / d_l)^(1/L), κ / (stride ‖θ‖)²)

    for L layers with d_l parameters, ‖θ‖ the length of all parameters with curvature, and κ the KL clip. As
    ``γ ‖V‖² ≤ ⟨V, ∇⟩``, of which the clip lets ``lr² ν² ⟨V, ∇⟩ ≤ κ`` through, no gradient moves the parameters by more
    than ``sqrt(κ / γ)``: by ``stride ‖θ‖`` where the second holds, however small the Fisher is and whatever the
    learning rate. More damping would only slow down what has little curvature. Where the KL clip is no number, the
    first holds.

    So γ means the same however the loss is scaled: a loss times c has c² times the Fisher, and c² times the κ of equal
    steps. It does not follow the Fisher later on, which vanishes as a model fits its data; steps would grow without
    bound. docs/damping.md tells what it reaches on the embedded tasks. Learning rate and KL clip remain the user's.

    Attributes:
        share: What γ is at most, in units of the layers' mean eigenvalues, above 0.
        stride: The share of the parameters' length that one gradient may move them by, above 0.

    Raises:
        ValueError: if one is not above 0.
    """

    share: float = 20.0
    stride: float = 0.025

    sizes = True

    def __post_init__(self) -> None:
        """Check the options."""
        check_number("share", self.share, "a number > 0", minimum=0, strict=True)
        check_number("stride", self.stride, "a number > 0", minimum=0, strict=True)

    def begin(self) -> _Sized:
        """See `Adaptive.begin`."""
        return _Sized(self)


class _Sized(Adaptation):
    """The rule in one training."""

    def __init__(self, options: Autopilot) -> None:
        self._options, self._known = options, False
        self.gamma = _UNKNOWN

    @property
    def awaits_sizes(self) -> bool:
        return not self._known

    def measure(self, sizes: Sequence[float], room: float) -> None:
        usable = [size for size in sizes if isfinite(size) and size > 0]
        counted = [log(size) for size in usable if size > _NEGLIGIBLE * max(usable)]
        if counted:
            size = exp(sum(counted) / len(counted))
            self.gamma, self._known = min(self._options.share * size, room / self._options.stride**2), True

    def learn(self, outcome: Outcome) -> None:
        raise AssertionError("it compares nothing")

    def state_dict(self) -> dict[str, float]:
        return {"gamma": self.gamma, "known": int(self._known)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.gamma, self._known = float(state["gamma"]), bool(state["known"])
