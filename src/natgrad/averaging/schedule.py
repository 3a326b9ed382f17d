"""When nodes average: the phases of a training, how often in each, and warnings where a schedule never advances."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Literal

from natgrad.errors import NatgradWarning, require
from natgrad.preconditioner.epochs import PATIENCE
from natgrad.schedule import check_number, check_whole

Phase = Literal["warm-up", "cycling", "cool-down"]


@dataclass(kw_only=True)
class Epochs:
    """The phases of a training, and which batch of which epoch is next.

    The beginning and the end of a training are blocking, with cycling in between. Lengths are in steps, or in epochs
    where the steps of an epoch are not known.

    Attributes:
        steps: The steps of an epoch; None: the user ends each by a call.
        total: The length of the training; None: not known, and no cool-down.
        warmup: How much of it is warm-up.
        cooldown: How much of it is cool-down.
        epoch: How many have ended.
        batches: Batches of this epoch so far.
        counted: Whether `steps` has ended an epoch that the user has not ended by a call since.
    """

    steps: int | None = None
    total: int | None = None
    warmup: int = 0
    cooldown: int = 0
    epoch: int = 0
    batches: int = 0
    counted: bool = False

    @classmethod
    def of(cls, epochs: Any, steps_per_epoch: Any, warmup: Any, cooldown: Any) -> Epochs:
        """Return the phases for the arguments of `natgrad.DASO` that are in epochs.

        Raises:
            ValueError: naming the first that is not allowed.
        """
        whole = isinstance(steps_per_epoch, int) and not isinstance(steps_per_epoch, bool)
        fits = steps_per_epoch is None or (whole and steps_per_epoch > 0)
        require(fits, "steps_per_epoch", steps_per_epoch, "a whole number > 0, or None")
        kinds = (int,) if steps_per_epoch is None else (int, float)
        lengths = (("epochs", epochs, 1e-9), ("warmup_epochs", warmup, 0), ("cooldown_epochs", cooldown, 0))
        for name, value, least in lengths:
            fits = isinstance(value, kinds) and not isinstance(value, bool) and least <= value < inf
            allowed = f"None, or a number {'above' if least else '>='} 0 (whole without steps_per_epoch)"
            require(value is None or fits, name, value, allowed)
        usual = max(1, epochs // 10) if epochs is not None and epochs >= 3 else 0
        warmup = usual if warmup is None else warmup
        cooldown = usual if cooldown is None else cooldown
        if epochs is None and cooldown:
            problem = f"cooldown_epochs = {cooldown} is counted from the end, and epochs is not given"
            warnings.warn(f"natgrad: {problem}: there is no cool-down", NatgradWarning, stacklevel=3)
            cooldown = 0
        fits = epochs is None or warmup + cooldown <= epochs
        require(fits, "warmup_epochs + cooldown_epochs", warmup + cooldown, f"at most epochs ({epochs})")
        unit = 1 if steps_per_epoch is None else steps_per_epoch
        total = None if epochs is None else round(epochs * unit)
        return cls(steps=steps_per_epoch, total=total, warmup=round(warmup * unit), cooldown=round(cooldown * unit))

    @property
    def phase(self) -> Phase:
        """The phase of the next batch."""
        return self.phase_at(self.batches)

    def phase_at(self, batch: int) -> Phase:
        """Return the phase of a batch of this epoch."""
        position = self.epoch if self.steps is None else self.epoch * self.steps + batch
        if position < self.warmup:
            return "warm-up"
        if self.total is not None and position >= self.total - self.cooldown:
            return "cool-down"
        return "cycling"

    def advance(self) -> bool:
        """Count a batch; return whether it is the last of its epoch."""
        self.batches += 1
        last = self.batches == self.steps
        self.counted = self.counted or last
        return last

    def end_by_call(self) -> bool:
        """Return whether a call that an epoch has ended ends one that `steps` has not ended already.

        Warn where the epoch has more steps than `steps`, which is then what counts.
        """
        if not self.batches:
            self.counted = False
        elif self.counted:
            warnings.warn(
                f"natgrad: next_epoch() came {self.batches} steps after step() had ended an epoch of steps_per_epoch="
                f"{self.steps}, and does not end another: tell how many steps the loader has, or leave that out",
                NatgradWarning,
                stacklevel=3,
            )
        return self.batches > 0 and not self.counted

    def next(self) -> None:
        """Begin the next epoch."""
        self.epoch, self.batches = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""
        return {"epoch": self.epoch, "batches": self.batches, "counted": self.counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.epoch, self.batches, self.counted = state["epoch"], state["batches"], state["counted"]

    def longest_cycling(self) -> int | None:
        """Return how many batches of the cycling phase at most follow each other without a synchronisation.

        The last step of an epoch synchronises. None: there is no such phase, or the steps of an epoch are not known.
        """
        if self.steps is None:
            return None
        # A run of less than an epoch is a trial, and judged as what it is a trial of.
        end = inf if self.total is None or self.total < self.steps else self.total - self.cooldown
        if end <= self.warmup:
            return None
        first = self.warmup // self.steps * self.steps
        # Of the epochs that the phase touches the first two and the last are all that can differ.
        last = first + 2 * self.steps if end == inf else int((end - 1) // self.steps) * self.steps
        starts = {first, first + self.steps, last}
        return int(max(min(end, start + self.steps - 1) - max(self.warmup, start) for start in starts))


@dataclass
class Plateau:
    """Finds where the training loss has stopped to fall.

    Attributes:
        patience: How many epochs in a row it may fail to fall before that counts as a plateau.
        threshold: By which share of itself the best loss has to be undercut.
        best: The lowest loss so far, or since the last plateau was found.
        waited: For how many epochs it has not been undercut.
    """

    patience: int = 2
    threshold: float = 1e-2
    best: float | None = None
    waited: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_whole("patience", self.patience, 1)
        check_number("threshold", self.threshold, "at least 0 and below 1", minimum=0)
        require(self.threshold < 1, "threshold", self.threshold, "at least 0 and below 1")

    def found(self, loss: float) -> bool:
        """Take an epoch's mean loss, and return whether it makes a plateau; then counting begins anew.

        One that is not finite is no progress, and nothing to be measured against.
        """
        if isfinite(loss) and (self.best is None or loss < self.best - self.threshold * abs(self.best)):
            self.best, self.waited = loss, 0
            return False
        self.waited += 1
        if self.waited < self.patience:
            return False
        self.waited = 0
        return True


@dataclass
class Cycle:
    """How many batches lie between two messages (B), and between a message and its merge (S <= B).

    Attributes:
        between: B, now.
        wait: S, now; 0: each message is waited for at once.
        plateau: Decides when both halve.
        batches: Batches since the last message, or since the epoch began.
        since_sent: Batches since the message under way was sent; None: there is none.
    """

    between: int
    wait: int
    plateau: Plateau = field(default_factory=Plateau)
    batches: int = 0
    since_sent: int | None = None

    def __post_init__(self) -> None:
        """Check B and S."""
        require(self.between >= 1, "batches_between", self.between, "a whole number >= 1")
        fits = 0 <= self.wait <= self.between
        require(fits, "batches_to_wait", self.wait, f"from 0 to batches_between ({self.between})")
        self._start = self.between, self.wait

    def check_fits(self, epochs: Epochs) -> None:
        """Check that messages are sent and merged, where the steps of an epoch are known.

        An epoch's last step synchronises all ranks and forgets what is under way. A message is therefore sent only if B
        batches of the cycling phase follow each other before it, and merged only if B + S do.

        Raises:
            ValueError: naming the first argument that is not allowed.
        """
        steps, longest = epochs.steps, epochs.longest_cycling()
        if longest is None:
            return
        allowed = "above batches_between + batches_to_wait, for the last step of an epoch synchronises all ranks"
        require(steps != 1, "steps_per_epoch", steps, allowed)
        why = (
            f"an epoch of steps_per_epoch={steps} ends in a synchronisation, which at most {longest} batches of the "
            "cycling phase precede"
        )
        allowed = f"at most {longest}, or no message is ever sent: {why}"
        require(self.between <= longest, "batches_between", self.between, allowed)
        room = longest - self.between
        allowed = f"at most {room} with batches_between={self.between}, or no message is ever merged: {why}"
        require(self.wait <= room, "batches_to_wait", self.wait, allowed)

    def advance(self) -> tuple[bool, bool]:
        """Count a batch; return whether the message under way is now to be merged, and whether one is to be sent.

        The merge comes first. One that is sent with S = 0 is to be merged at once, and is not counted as under way.
        """
        self.batches += 1
        if self.since_sent is not None:
            self.since_sent += 1
        merges = self.since_sent is not None and self.since_sent >= self.wait
        sends = self.batches >= self.between
        if merges:
            self.since_sent = None
        if sends:
            self.batches = 0
            self.since_sent = 0 if self.wait else None
        return merges, sends

    def restart(self) -> None:
        """Begin anew after all ranks have synchronised: nothing is under way."""
        self.batches, self.since_sent = 0, None

    def end_epoch(self, loss: float | None) -> None:
        """Halve B and S on a plateau of the mean loss, down to 1; where both are there, go back to their start.

        Source: Coquelin et al. 2021, section 3. An S of 0 stays 0.
        """
        if loss is None or not self.plateau.found(loss):
            return
        floor = min(1, self._start[1])
        if (self.between, self.wait) == (1, floor):
            self.between, self.wait = self._start
        else:
            self.between, self.wait = max(1, self.between // 2), max(floor, self.wait // 2)

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""
        return {
            "between": self.between,
            "wait": self.wait,
            "batches": self.batches,
            "flying": self.since_sent,
            "best": self.plateau.best,
            "waited": self.plateau.waited,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.between, self.wait = state["between"], state["wait"]
        self.batches, self.since_sent = state["batches"], state["flying"]
        self.plateau.best, self.plateau.waited = state["best"], state["waited"]


# --- Schedules that do not advance ------------------------------------------------------------------------------


def warn_without_epochs(epochs: Epochs, *, synchronized: bool) -> None:
    """Warn after the thousandth step of the first epoch, where only a call ends it."""
    if epochs.steps is not None or epochs.epoch or epochs.batches != PATIENCE:
        return
    if epochs.warmup:
        known = f" of epochs={epochs.total}" if epochs.total is not None else ""
        problem = f"DASO is still in its first epoch{known}, a warm-up in which all nodes wait for each other "
        problem += "at each step"
    elif epochs.total is not None:
        problem = f"DASO is still in its first epoch of epochs={epochs.total}: buffers (norm statistics) are not "
        problem += "averaged, and no cool-down comes"
    elif synchronized:
        return
    else:
        problem = "DASO without epochs= has neither warm-up nor cool-down, and buffers (norm statistics) are not "
        problem += "averaged"
    message = (
        f"natgrad: {PATIENCE} steps without next_epoch(): {problem}. Give epochs= and steps_per_epoch=, or call "
        "next_epoch() after each epoch (if the first has more steps, and the call is still to come, all is well)"
    )
    warnings.warn(message, NatgradWarning, stacklevel=3)


def warn_of_short_epoch(epochs: Epochs, cycle: Cycle, merges: int) -> None:
    """Warn, before the first epoch of the cycling phase ends by a call, if it was too short for a message."""
    steps = epochs.batches
    is_first = epochs.steps is None and epochs.epoch == epochs.warmup and epochs.phase == "cycling"
    if not is_first or merges or steps >= cycle.between + cycle.wait:
        return
    never = "merged, for the end forgets what is under way" if steps >= cycle.between else "sent"
    message = (
        f"natgrad: an epoch of {steps} steps ends with batches_between={cycle.between} and "
        f"batches_to_wait={cycle.wait}: no message between nodes was {never}. Choose them at most {steps} in sum"
    )
    warnings.warn(message, NatgradWarning, stacklevel=3)
