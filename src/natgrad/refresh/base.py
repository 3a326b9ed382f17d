"""The face of a clock: when what is captured and renewed, from counters and measured numbers alone.

No clock knows ranks, tensors or layers' types. It has no state either: what a training remembers of it is kept by
whoever asks (`natgrad.renewal.agenda`), so that all ranks that have heard the same decide the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from natgrad.refresh.rule import By, Rule
from natgrad.refresh.sides import READS, SIDES, Reads, Side


class Clock(ABC):
    """When curvature is renewed; one file a clock.

    Attributes:
        rule: What decides, layer by layer, whether it is renewed where that is due; None: all of them are.
        by: What it decides on as one: all of a "layer", or each "factor" by itself.
        share: The share of the time that preconditioning may take; None: any.
        separate: Whether A and G have clocks of their own.
    """

    rule: Rule | None = None
    by: By = "layer"
    share: float | None = None
    separate: bool = False

    @abstractmethod
    def factor_interval(self, step: int, side: Side = "gradients") -> float:
        """Return the steps between two captures of what is of one side, after `step` completed steps.

        Raises:
            ValueError: if a callable returns what is no interval.
        """

    @abstractmethod
    def inverse_interval(self, step: int, reads: Reads = "both") -> float:
        """Return the steps between two renewals of what reads one side, or both.

        Raises:
            ValueError: if a callable returns what is no interval.
        """

    @abstractmethod
    def intervals(self, step: int) -> dict[str, float]:
        """Return the mean intervals "factors" and "inverses" after `step` completed steps.

        Raises:
            ValueError: if a callable returns what is no interval.
        """

    def settings(self, step: int) -> object:
        """Return what has to be the same on all ranks, as far as it can be told."""
        return self.intervals(step)

    def check(self, step: int) -> None:
        """Check what the step after `step` completed ones will read, before it changes anything.

        Raises:
            ValueError: if a callable returns what is no interval.
        """
        for side in SIDES:
            self.factor_interval(step + 1, side)
        for reads in READS:
            self.inverse_interval(step, reads)

    def factors_due(self, step: int, last: int | None, side: Side = "gradients") -> bool:
        """Tell whether the step after `step` completed ones captures one side, the last such step being `last`."""
        return _due(self.factor_interval(step, side), step, last)

    def inverses_due(self, step: int, last: int | None, reads: Reads = "both") -> bool:
        """Tell whether the step after `step` completed ones renews what reads one side, or both, after `last`."""
        return _due(self.inverse_interval(step, reads), step, last)


def _due(interval: float, step: int, last: int | None) -> bool:
    return last is None or step - last >= interval
