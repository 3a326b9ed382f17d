"""Whether DASO's schedule advances: phases that never end, messages that are never sent or never merged."""

from __future__ import annotations

import warnings
from math import inf

from natgrad.averaging.schedule import Cycle, Epochs, Phases
from natgrad.epoch_warnings import PATIENCE
from natgrad.errors import NatgradWarning, require


def check_cycle(cycle: Cycle, epochs: Epochs) -> None:
    """Check that messages are sent and merged, where the steps of an epoch are known.

    An epoch's last step synchronises all ranks and forgets what is under way. A message is therefore sent only if B
    batches of the cycling phase follow each other before it, and merged only if B + S do.

    Args:
        cycle: B and S.
        epochs: The phases, and the steps of an epoch.

    Raises:
        ValueError: naming the first argument that is not allowed.
    """
    steps = epochs.steps
    longest = None if steps is None else longest_cycling(epochs.phases, steps)
    if longest is None:
        return
    allowed = "above batches_between + batches_to_wait, for the last step of an epoch synchronises all ranks"
    require(steps != 1, "steps_per_epoch", steps, allowed)
    why = (
        f"an epoch of steps_per_epoch={steps} ends in a synchronisation, which at most {longest} batches of the "
        "cycling phase precede"
    )
    allowed = f"at most {longest}, or no message is ever sent: {why}"
    require(cycle.between <= longest, "batches_between", cycle.between, allowed)
    room = longest - cycle.between
    allowed = f"at most {room} with batches_between={cycle.between}, or no message is ever merged: {why}"
    require(cycle.wait <= room, "batches_to_wait", cycle.wait, allowed)


def longest_cycling(phases: Phases, steps: int) -> int | None:
    """Return how many batches of the cycling phase follow each other at most without a synchronisation; None: no phase.

    Args:
        phases: In steps.
        steps: Those of an epoch, of which the last synchronises.
    """
    # A run of less than an epoch is a trial, and judged as what it is a trial of.
    begin, end = phases.warmup, inf
    if phases.total is not None and phases.total >= steps:
        end = phases.total - phases.cooldown
    if end <= begin:
        return None
    first = int(begin // steps) * steps
    # Of the epochs that the phase touches the first two and the last are all that can differ.
    last = first + 2 * steps if end == inf else int((end - 1) // steps) * steps
    starts = {first, first + steps, last}
    return int(max(min(end, start + steps - 1) - max(begin, start) for start in starts))


class ScheduleWarnings:
    """Warns once where a schedule waits for epochs that never end, or that are too short for its messages.

    Attributes:
        synchronized: Whether all ranks were made equal at any time.
    """

    def __init__(self, epochs: Epochs) -> None:
        """Follow `epochs`."""
        self._epochs, self._judged, self.synchronized = epochs, False, False

    def step_ended(self) -> None:
        """Warn after the thousandth step of the first epoch, where only a call ends it."""
        epochs, phases = self._epochs, self._epochs.phases
        if epochs.steps is not None or epochs.epoch or epochs.batches != PATIENCE:
            return
        if phases.warmup:
            known = f" of epochs={phases.total}" if phases.total is not None else ""
            problem = f"DASO is still in its first epoch{known}, a warm-up in which all nodes wait for each other "
            problem += "at each step"
        elif phases.total is not None:
            problem = f"DASO is still in its first epoch of epochs={phases.total}: buffers (norm statistics) are not "
            problem += "averaged, and no cool-down comes"
        elif self.synchronized:
            return
        else:
            problem = "DASO without epochs= has neither warm-up nor cool-down, and buffers (norm statistics) are not "
            problem += "averaged"
        self._warn(
            f"natgrad: {PATIENCE} steps without next_epoch(): {problem}. Give epochs= and steps_per_epoch=, or call "
            "next_epoch() after each epoch (if the first has more steps, and the call is still to come, all is well)"
        )

    def epoch_ends(self, cycle: Cycle, merges: int) -> None:
        """Warn, before an epoch of the cycling phase ends by a call, if it was too short for a message.

        Args:
            cycle: B and S.
            merges: How many messages were merged so far.
        """
        steps = self._epochs.batches
        if self._judged or self._epochs.steps is not None or self._epochs.phase != "cycling":
            return
        self._judged = True
        if merges or steps >= cycle.between + cycle.wait:
            return
        never = "merged, for the end forgets what is under way" if steps >= cycle.between else "sent"
        self._warn(
            f"natgrad: an epoch of {steps} steps ends with batches_between={cycle.between} and "
            f"batches_to_wait={cycle.wait}: no message between nodes was {never}. Choose them at most {steps} in sum"
        )

    @staticmethod
    def _warn(message: str) -> None:
        warnings.warn(message, NatgradWarning, stacklevel=4)  # at who called the averager
