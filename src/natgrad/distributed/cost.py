"""Model what messages and computation cost: pure functions of sizes."""

from __future__ import annotations

from dataclasses import dataclass

from natgrad.errors import require
from natgrad.schedule import is_number


@dataclass(frozen=True, kw_only=True)
class Link:
    """The cost of messages and of computation.

    A message of n bytes takes ``latency + n / bandwidth`` seconds; c multiply-adds take c divided by the speed. The
    defaults are for one core of a server, gloo and a 10 Gbit/s network.

    Attributes:
        latency: α in seconds, including what the host does for a message.
        bandwidth: Bytes a second, 1 / β.
        speed: Multiply-adds of decompositions a second: d³ for the inverse of a factor of size d, 5 d³ for its
            eigenvectors.
        products: Multiply-adds of matrix products a second.

    Raises:
        ValueError: unless each is a finite number > 0 (the latency: >= 0).
    """

    latency: float = 2e-4
    bandwidth: float = 1.25e9
    speed: float = 5e10
    products: float = 5e10

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("latency", "bandwidth", "speed", "products"):
            value = getattr(self, name)
            fits = is_number(value) and (value > 0 or (name == "latency" and value == 0))
            require(fits, name, value, "a finite number >= 0" if name == "latency" else "a finite number > 0")

    def message(self, size: float) -> float:
        """Return the seconds that a message of `size` bytes takes."""
        return self.latency + size / self.bandwidth

    def work(self, cost: float) -> float:
        """Return the seconds that a decomposition of `cost` multiply-adds takes."""
        return cost / self.speed


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """The intervals that costs depend on.

    Attributes:
        factors: Steps between two factor refreshes.
        inverses: Steps between two inverse refreshes.
        reduces: Whether natgrad, and not the model's wrapper, sums the gradients over the ranks at every step.

    Raises:
        ValueError: unless both intervals are finite numbers >= 1.
    """

    factors: float = 1
    inverses: float = 10
    reduces: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("factors", "inverses"):
            value = getattr(self, name)
            require(is_number(value) and value >= 1, name, value, "a number of steps >= 1")
