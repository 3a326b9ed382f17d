"""A clock whose preconditioning takes no more than a share of the time."""

from __future__ import annotations

from dataclasses import dataclass, field

from typing_extensions import override

from natgrad.errors import require
from natgrad.refresh.adaptive import Adaptive
from natgrad.refresh.base import Clock
from natgrad.refresh.fixed import Refresh
from natgrad.refresh.norm import NormRule
from natgrad.refresh.rule import By, Rule
from natgrad.refresh.sides import Reads, Side
from natgrad.schedule import check_number

_NORM = NormRule()


@dataclass(frozen=True, kw_only=True)
class Capped(Clock):
    """Stretch the intervals of another clock so that preconditioning takes at most `share` of the time of training.

    All of its time counts, measured by the host and summed over the ranks: capture, messages, renewals and solves.
    Where a renewal is due, the layers that have changed most since their last one are renewed first, as long as there
    is time for them in the account (`natgrad.refresh.budget`); the others wait for the next. Where the account is
    overdrawn, nothing is captured or renewed until steps have balanced it. The first renewal takes what it takes. An
    evaluation or a checkpoint between steps is no time of training (`natgrad.refresh.budget.Pace`). Renewals beside the
    steps (placement "background") count as if these waited for them.

    Attributes:
        refresh: The clock, at whose intervals things happen where there is time: `natgrad.Refresh` or
            `natgrad.Adaptive`.
        share: Of the time of the steps, in (0, 1).

    Raises:
        ValueError: if `refresh` is another clock, or one with `natgrad.Sides`; or `share` is not in (0, 1).
    """

    refresh: Refresh | Adaptive = field(default_factory=Refresh)
    share: float = 0.1

    def __post_init__(self) -> None:
        """Check the clock and the share."""
        fits = isinstance(self.refresh, (Refresh, Adaptive)) and not self.refresh.separate
        require(fits, "refresh", self.refresh, "a natgrad.Refresh without natgrad.Sides, or a natgrad.Adaptive")
        check_number("share", self.share, "a number in (0, 1)", minimum=0, strict=True)
        require(self.share < 1, "share", self.share, "a number in (0, 1)")

    @property
    @override
    def rule(self) -> Rule:  # type: ignore[override]
        return self.refresh.rule or _NORM

    @property
    @override
    def by(self) -> By:  # type: ignore[override]
        return self.refresh.by

    def factor_interval(self, step: int, side: Side = "gradients") -> float:
        """See `Clock.factor_interval`: without the cap."""
        return self.refresh.factor_interval(step, side)

    def inverse_interval(self, step: int, reads: Reads = "both") -> float:
        """See `Clock.inverse_interval`: without the cap."""
        return self.refresh.inverse_interval(step, reads)

    def intervals(self, step: int) -> dict[str, float]:
        """See `Clock.intervals`: without the cap."""
        return self.refresh.intervals(step)

    @override
    def settings(self, step: int) -> object:
        return self.share, self.refresh.settings(step)
