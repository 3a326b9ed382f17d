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
    """γ by the size of the Fisher itself: `share` times the geometric mean of the layers' mean eigenvalues.

    It is read off the statistics of the first renewal, before their first use, and kept from then on:

        γ = share · (Π_l tr F_l / d_l)^(1/L)

    for L layers with d_l parameters. So γ means the same however the loss is scaled: a loss times c has c² times the
    Fisher. It does not follow the Fisher later on, which vanishes as a model fits its data; steps would grow without
    bound. docs/damping.md tells what it reaches on the embedded tasks. Learning rate and KL clip remain the user's.

    Attributes:
        share: What γ is in those units, above 0.

    Raises:
        ValueError: if it is not above 0.
    """

    share: float = 5.0

    sizes = True

    def __post_init__(self) -> None:
        """Check the share."""
        check_number("share", self.share, "a number > 0", minimum=0, strict=True)

    def begin(self) -> _Sized:
        """See `Adaptive.begin`."""
        return _Sized(self.share)


class _Sized(Adaptation):
    """The rule in one training."""

    def __init__(self, share: float) -> None:
        self._share, self._known = share, False
        self.gamma = _UNKNOWN

    @property
    def awaits_sizes(self) -> bool:
        return not self._known

    def measure(self, sizes: Sequence[float]) -> None:
        usable = [size for size in sizes if isfinite(size) and size > 0]
        counted = [log(size) for size in usable if size > _NEGLIGIBLE * max(usable)]
        if counted:
            self.gamma, self._known = self._share * exp(sum(counted) / len(counted)), True

    def learn(self, outcome: Outcome) -> None:
        raise AssertionError("it compares nothing")

    def state_dict(self) -> dict[str, float]:
        return {"gamma": self.gamma, "known": int(self._known)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.gamma, self._known = float(state["gamma"]), bool(state["known"])
