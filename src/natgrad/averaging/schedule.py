"""When nodes average: the phases of a training, and how often in each. Pure: no tensor, no process group."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

from natgrad.errors import NatgradWarning, require
from natgrad.schedule import check_number, check_whole

Phase = Literal["warm-up", "cycling", "cool-down"]


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Blocking at the beginning and at the end of a training, cycling in between.

    Attributes:
        total: The length of the training; None: not known, and no cool-down.
        warmup: How much of it is warm-up.
        cooldown: How much of it is cool-down.
    """

    total: float | None = None
    warmup: float = 0
    cooldown: float = 0

    def __post_init__(self) -> None:
        """Check that they fit."""
        for name in ("warmup", "cooldown"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        require(self.total is None or self.total > 0, "total", self.total, "above 0, or None")
        known = self.total is not None or self.cooldown == 0
        require(known, "cooldown", self.cooldown, "0 where the length of the training is not known")

    def at(self, position: float) -> Phase:
        """Return the phase at a position, counted from 0 in the same units."""
        if position < self.warmup:
            return "warm-up"
        if self.total is not None and position >= self.total - self.cooldown:
            return "cool-down"
        return "cycling"


@dataclass
class Epochs:
    """Which batch of which epoch is next.

    Attributes:
        phases: Of the training, in steps, or in epochs where their length is not known.
        steps: That length; None: the user tells where an epoch ends.
        epoch: How many have ended.
        batches: Those of this epoch so far.
        counted: Whether `steps` has ended an epoch and the user not told, right then, that it has ended.
    """

    phases: Phases
    steps: int | None
    epoch: int = 0
    batches: int = 0
    counted: bool = False

    @property
    def phase(self) -> Phase:
        """The phase of the next batch."""
        return self.phase_at(self.batches)

    def phase_at(self, batch: int) -> Phase:
        """Return the phase of a batch of this epoch."""
        return self.phases.at(self.epoch if self.steps is None else self.epoch * self.steps + batch)

    def advance(self) -> bool:
        """Count a batch; tell whether it is its epoch's last."""
        self.batches += 1
        last = self.batches == self.steps
        self.counted = self.counted or last
        return last

    def told(self) -> bool:
        """Hear from the user that an epoch has ended; tell whether it is one that has not been counted.

        With a warning where it has more than `steps`, which is then what counts.
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


@dataclass
class Plateau:
    """Tells when the training loss has stopped to fall.

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
        """Take an epoch's mean loss, and tell whether it makes a plateau; then counting begins anew.

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
        plateau: Tells when both halve.
        batches: Batches since the last message, or since the epoch began.
        flying: Batches since the message that is under way; None: there is none.
    """

    between: int
    wait: int
    plateau: Plateau = field(default_factory=Plateau)
    batches: int = 0
    flying: int | None = None

    def __post_init__(self) -> None:
        """Check B and S."""
        require(self.between >= 1, "batches_between", self.between, "a whole number >= 1")
        fits = 0 <= self.wait <= self.between
        require(fits, "batches_to_wait", self.wait, f"from 0 to batches_between ({self.between})")
        self._start = self.between, self.wait

    def advance(self) -> tuple[bool, bool]:
        """Count a batch; tell whether the message under way is now to be merged, and whether one is to be sent.

        The merge comes first. One that is sent with S = 0 is to be merged at once, and is not counted as under way.
        """
        self.batches += 1
        merges = False
        if self.flying is not None:
            self.flying += 1
            merges = self.flying >= self.wait
        sends = self.batches >= self.between
        if merges:
            self.flying = None
        if sends:
            self.batches = 0
            self.flying = 0 if self.wait else None
        return merges, sends

    def restart(self) -> None:
        """Begin anew after all ranks have synchronised: nothing is under way."""
        self.batches, self.flying = 0, None

    def end_epoch(self, loss: float | None) -> None:
        """Halve B and S on a plateau of the loss, down to 1; where both are there, go back to their start.

        Args:
            loss: The mean training loss of the epoch over all ranks; None: not known, nothing changes.

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
            "flying": self.flying,
            "best": self.plateau.best,
            "waited": self.plateau.waited,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.between, self.wait = state["between"], state["wait"]
        self.batches, self.flying = state["batches"], state["flying"]
        self.plateau.best, self.plateau.waited = state["best"], state["waited"]
