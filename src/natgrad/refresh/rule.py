"""The face of a rule: whether one layer is renewed, from a number that is measured of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, TypeAlias

Verdict: TypeAlias = Literal["renew", "keep", "stop"]
Measure: TypeAlias = Literal["trace", "norm", "drift", "basis"]
By: TypeAlias = Literal["layer", "factor"]

# What can be measured of a factor by itself; the others are of the layer that the factors make up.
OF_FACTORS: tuple[Measure, ...] = ("drift", "basis")


class Rule(ABC):
    """Decides where a renewal is due; one file a rule.

    Attributes:
        measure: What is measured of a layer, a number that `natgrad.renewal.measure` makes. "trace": that of its
            damped Fisher block. "norm": the product of the Frobenius norms of its statistics. "drift": how far these
            are from what they were when it was renewed last, relative to that. "basis": what its eigenvectors leave off
            the diagonal, relative to all. The last two are measured of each factor; the largest is that of the layer.
        stops: Whether it ever says "stop". A layer whose statistics have not changed at all is kept where it does.
    """

    measure: ClassVar[Measure]
    stops: bool = False

    def __repr__(self) -> str:
        """Show the rule and its options, the same on every rank: by this ranks tell that theirs are alike."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    @abstractmethod
    def change(self, value: float, last: float | None) -> float:
        """Return by how much a layer, or one of its factors, has changed: where time is short, the least changed wait.

        Args:
            value: What is measured now.
            last: What `remember` returned last; None: there is nothing yet.
        """

    @abstractmethod
    def verdict(self, change: float) -> Verdict:
        """Tell what becomes of what has changed so much: it is renewed, kept for now, or for good (if all of it is)."""

    def remember(self, value: float, last: float | None, *, renewed: bool) -> float | None:
        """Return what the next measurement of a layer is compared with; of several factors `value` is the largest."""
        return None
