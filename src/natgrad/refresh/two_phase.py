"""Every step at first, then a fixed interval (Osawa 2019, eq. 23)."""

from __future__ import annotations

from dataclasses import dataclass

from natgrad.errors import require


@dataclass(frozen=True)
class TwoPhaseInterval:
    """1 before epoch 13, then 20: of the steps of 45 epochs 32 % are refreshes (Osawa 2019, eq. 23).

    Attributes:
        steps_per_epoch: Steps of an epoch.
        epochs: How many epochs have a refresh at every step.
        interval: The interval afterwards.

    Raises:
        ValueError: unless all are whole numbers, `epochs` of at least 0 and the others of at least 1.
    """

    steps_per_epoch: int
    epochs: int = 13
    interval: int = 20

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, value in vars(self).items():
            least = 0 if name == "epochs" else 1
            require(type(value) is int and value >= least, name, value, f"a whole number >= {least}")

    def __call__(self, step: int) -> int:
        """Return the interval after `step` completed steps."""
        return 1 if step < self.epochs * self.steps_per_epoch else self.interval
