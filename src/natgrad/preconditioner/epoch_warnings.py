"""Warnings about epochs that never end, or that are shorter than a schedule expects."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from natgrad.errors import NatgradWarning
from natgrad.preconditioner.epochs import sums_gradients
from natgrad.refresh import RefreshRule, Sides
from natgrad.state.block_group import BlockGroup

PATIENCE = 1000
"""After how many steps of the first epoch `next_epoch` is missed."""
_SHORTER = 2
"""By which factor an epoch has to be shorter than an interval expects."""


class EpochWarnings:
    """Counts the epochs of a `natgrad.Preconditioner`, and warns once of each mistake. Never waits."""

    def __init__(self, refresh: RefreshRule) -> None:
        """Find intervals of `refresh` that assume a number of steps per epoch."""
        self._intervals = {interval.steps_per_epoch: interval for interval in _counting(refresh)}
        self._steps = self._began = 0

    def step_ended(self, step: int, epoch: int, groups: Iterable[BlockGroup]) -> None:
        """Count a step. Warn after the 1000th, if a curvature depends on epochs and the first has not ended.

        Args:
            step: Completed steps.
            epoch: The number of ended epochs.
            groups: The groups; read in that step only.
        """
        self._steps += 1
        if step != PATIENCE or epoch:
            return
        waiting = next((one.curvature for one in groups if sums_gradients(one)), None)
        if waiting is not None:
            warnings.warn(
                f"natgrad: {PATIENCE} steps without next_epoch(): {waiting!r} takes them all for its first epoch, in "
                "which it always chooses KID. Call preconditioner.next_epoch() after each epoch, or choose "
                'method="kid" (if the first epoch has more steps, and the call is still to come, all is well)',
                NatgradWarning,
                stacklevel=4,
            )

    def epoch_ended(self, step: int) -> None:
        """Warn if the epoch was much shorter than an interval assumes.

        Args:
            step: Completed steps.
        """
        whole = step - self._steps == self._began  # no state was loaded in between
        steps, self._steps, self._began = self._steps, 0, step
        if not whole or not steps:
            return
        for expected in [expected for expected in self._intervals if expected >= _SHORTER * steps]:
            interval = self._intervals.pop(expected)
            warnings.warn(
                f"natgrad: an epoch ended after {steps} steps, but {interval!r} takes {expected} for one, and advances "
                "so much later: give it the optimizer steps of an epoch, as len(loader), not its samples",
                NatgradWarning,
                stacklevel=3,
            )


def _counting(schedule: object) -> Iterator[Any]:
    """Yield the intervals of a rule that have a `steps_per_epoch`, including sides and nested rules."""
    for value in getattr(schedule, "__dict__", {}).values():
        if isinstance(value, (RefreshRule, Sides)):
            yield from _counting(value)
        elif isinstance(getattr(value, "steps_per_epoch", None), int):
            yield value
