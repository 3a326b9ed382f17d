"""What messages and decompositions cost, as far as placements ask: pure functions of sizes."""

from __future__ import annotations

from dataclasses import dataclass

from natgrad.errors import require


@dataclass(frozen=True, kw_only=True)
class Link:
    """A message of n bytes takes ``latency + n / bandwidth`` seconds; a decomposition of work c ``c / speed``.

    The defaults are those of one core of a server on a 10 Gbit/s network.

    Attributes:
        latency: α in seconds.
        bandwidth: Bytes a second, 1 / β.
        speed: Multiply-adds of decompositions a second.

    Raises:
        ValueError: unless each is a number > 0 (the latency: >= 0).
    """

    latency: float = 5e-5
    bandwidth: float = 1.25e9
    speed: float = 5e9

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("latency", "bandwidth", "speed"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            fits = number and (value > 0 or (name == "latency" and value == 0))
            require(fits, name, value, "a number >= 0" if name == "latency" else "a number > 0")

    def message(self, size: float) -> float:
        """Return the seconds that a message of `size` bytes takes."""
        return self.latency + size / self.bandwidth

    def work(self, cost: float) -> float:
        """Return the seconds that a decomposition of `cost` multiply-adds takes."""
        return cost / self.speed
