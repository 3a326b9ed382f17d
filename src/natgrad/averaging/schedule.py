"""The schedule of DASO: phases and intervals."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Literal

from natgrad.errors import require, warn
from natgrad.schedule import check_number, check_whole

Phase = Literal["warm-up", "cycling", "cool-down"]


@dataclass(kw_only=True)
class Epochs:
    """The phases of a training, and its position in them: completed epochs, and batches of the current one.

    Warm-up and cool-down are synchronous, with cycling in between. Lengths are in steps, or in epochs if `steps` is
    None: the user then ends each epoch by ``next_epoch()``. A `total` of None is unknown, without a cool-down.
    """

    steps: int | None = None
    total: int | None = None
    warmup: int = 0
    cooldown: int = 0
    epoch: int = 0
    batches: int = 0

    @classmethod
    def of(cls, epochs: Any, steps_per_epoch: Any, warmup: Any, cooldown: Any) -> Epochs:
        """Return the phases for arguments of `natgrad.DASO`; a ``ValueError`` names the first that is not allowed."""
        if steps_per_epoch is not None:
            check_whole("steps_per_epoch", steps_per_epoch, 1)
        kinds = (int,) if steps_per_epoch is None else (int, float)
        lengths = (("epochs", epochs, 1e-9), ("warmup_epochs", warmup, 0), ("cooldown_epochs", cooldown, 0))
        for name, value, least in lengths:
            fits = isinstance(value, kinds) and not isinstance(value, bool) and least <= value < inf
            allowed = f"None, or a number {'above' if least else '>='} 0 (whole without steps_per_epoch)"
            require(value is None or fits, name, value, allowed)
        default = max(1, epochs // 10) if epochs is not None and epochs >= 3 else 0
        warmup = default if warmup is None else warmup
        cooldown = default if cooldown is None else cooldown
        if epochs is None and cooldown:
            problem = f"cooldown_epochs={cooldown} has no effect without epochs"
            warn(f"natgrad: {problem}", "cool-down")
            cooldown = 0
        fits = epochs is None or warmup + cooldown <= epochs
        require(fits, "warmup_epochs + cooldown_epochs", warmup + cooldown, f"at most epochs ({epochs})")
        unit = 1 if steps_per_epoch is None else steps_per_epoch
        total = None if epochs is None else round(epochs * unit)
        return cls(steps=steps_per_epoch, total=total, warmup=round(warmup * unit), cooldown=round(cooldown * unit))

    @property
    def cycles(self) -> bool:
        """Whether there are batches between warm-up and cool-down."""
        return self.total is None or self.warmup < self.total - self.cooldown

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
        """Count a batch, and return whether it is the last of its epoch."""
        self.batches += 1
        return self.batches == self.steps

    def next(self) -> None:
        """Begin the next epoch."""
        self.epoch, self.batches = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position."""
        self.epoch, self.batches = state["epoch"], state["batches"]


@dataclass
class Plateau:
    """Detects plateaus of the training loss.

    Attributes:
        patience: The number of epochs without progress that make a plateau.
        threshold: Progress is a decrease of the best loss by more than this fraction.
        best: The lowest loss so far.
        waited: The number of epochs since the last progress or plateau.
    """

    patience: int = 2
    threshold: float = 1e-2
    best: float | None = None
    waited: int = 0

    def __post_init__(self) -> None:
        check_whole("patience", self.patience, 1)
        check_number("threshold", self.threshold, "at least 0 and below 1", minimum=0)
        require(self.threshold < 1, "threshold", self.threshold, "at least 0 and below 1")

    def found(self, loss: float) -> bool:
        """Return whether an epoch with this mean loss completes a plateau. A non-finite loss counts as no progress."""
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
    """The batches between two messages (B), and between a message and its merge (S <= B).

    Attributes:
        between: The current B.
        wait: The current S. 0: the exchange is synchronous.
        plateau: The rule that halves both.
        batches: The number of batches since the last message, or since the epoch began.
        since_sent: The number of batches since the message in progress was sent. None: there is none.
    """

    between: int
    wait: int
    plateau: Plateau = field(default_factory=Plateau)
    batches: int = 0
    since_sent: int | None = None

    def __post_init__(self) -> None:
        require(self.between >= 1, "batches_between", self.between, "a whole number >= 1")
        fits = 0 <= self.wait <= self.between
        require(fits, "batches_to_wait", self.wait, f"from 0 to batches_between ({self.between})")
        self._start = self.between, self.wait

    def check_fits(self, steps: int | None) -> None:
        """Check that a message is merged before the last step of an epoch, which drops messages in progress.

        Raises:
            ValueError: if B + S is not below the `steps` of an epoch.
        """
        total, allowed = self.between + self.wait, f"below steps_per_epoch ({steps}), or no message is ever merged"
        require(steps is None or total < steps, "batches_between + batches_to_wait", total, allowed)

    def advance(self) -> tuple[bool, bool]:
        """Count a batch, and return whether to merge the message in progress, and then whether to send one.

        With S = 0 a message is merged when it is sent, and `since_sent` stays None.
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
        """Reset the counts after a synchronization."""
        self.batches, self.since_sent = 0, None

    def end_epoch(self, loss: float | None) -> None:
        """Halve B and S on a plateau of the mean loss, down to 1. If both are 1, return to their initial values.

        An S of 0 stays 0. Source: Coquelin et al. 2021, section 3.
        """
        if loss is None or not self.plateau.found(loss):
            return
        floor = min(1, self._start[1])
        if (self.between, self.wait) == (1, floor):
            self.between, self.wait = self._start
        else:
            self.between, self.wait = max(1, self.between // 2), max(floor, self.wait // 2)

    def state_dict(self) -> dict[str, Any]:
        """Return the intervals and counts."""
        return {
            "between": self.between,
            "wait": self.wait,
            "batches": self.batches,
            "flying": self.since_sent,
            "best": self.plateau.best,
            "waited": self.plateau.waited,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the intervals and counts."""
        self.between, self.wait = state["between"], state["wait"]
        self.batches, self.since_sent = state["batches"], state["flying"]
        self.plateau.best, self.plateau.waited = state["best"], state["waited"]
