"""Intervals that grow with the epochs (Osawa 2019, eq. 22)."""

from __future__ import annotations

from dataclasses import dataclass

from natgrad.errors import require


@dataclass(frozen=True)
class GrowingInterval:
    """``min(20, 5 ⌊e/5⌋ + 1)`` in epoch e: every step before epoch 5, then every 6th, 11th, 16th, at last every 20th.

    Of the steps of 45 epochs 17 % are refreshes (Osawa 2019, section 5.4). ``Refresh(inverses=GrowingInterval(78))``.

    Attributes:
        steps_per_epoch: Steps of an epoch: epochs are counted by it, whoever calls ``next_epoch()``. Where that is
            called after fewer than half as many steps there is a warning.
        epochs: After how many epochs it grows, and by how many steps.
        most: The longest interval.

    Raises:
        ValueError: unless all are whole numbers of at least 1.
    """

    steps_per_epoch: int
    epochs: int = 5
    most: int = 20

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, value in vars(self).items():
            require(type(value) is int and value >= 1, name, value, "a whole number >= 1")

    def __call__(self, step: int) -> int:
        """Return the interval after `step` completed steps."""
        epoch = step // self.steps_per_epoch
        return min(self.most, self.epochs * (epoch // self.epochs) + 1)
