"""Which clocks are of use for which curvatures."""

from __future__ import annotations

from collections.abc import Collection

from natgrad.curvature import Curvature
from natgrad.errors import require
from natgrad.refresh import Clock
from natgrad.renewal.measure import measurable


def check_use(clock: Clock, curvatures: Collection[Curvature]) -> None:
    """Check that a clock is of use for some layer; later on, all those that it is of use for may be frozen.

    Args:
        clock: The clock.
        curvatures: Those of the layers.

    Raises:
        ValueError: if not, naming the clock.
    """
    if clock.separate:
        fits = "one for both sides: it has nothing that is of the inputs alone"
        require(any(own.early for own in curvatures) or not curvatures, "refresh", clock, fits)
    rule = clock.rule
    if rule is not None:
        fits = f"one whose rule can measure some layer: none has a {rule.measure} here"
        require(not curvatures or any(measurable(own, rule.measure) for own in curvatures), "refresh", clock, fits)
