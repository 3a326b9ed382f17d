"""Which clocks go with which curvatures and placements."""

from __future__ import annotations

from collections.abc import Collection

from natgrad.curvature import Curvature
from natgrad.errors import require
from natgrad.placement import Placement
from natgrad.refresh import Clock
from natgrad.renewal.measure import measurable

# What leaves early is all of a layer's sums, and what is renewed beside the steps all of its parts.
_WHOLE = ("pipelined", "background")


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


def check_clock(clock: Clock, curvatures: Collection[Curvature], placement: Placement) -> None:
    """Check that what a clock decides can be done.

    Args:
        clock: The clock.
        curvatures: Those of the layers.
        placement: Who works; never "auto".

    Raises:
        ValueError: if not, naming the clock or the placement.
    """
    replaying = next((own for own in curvatures if own.replays), None)
    name, rule = placement.name, clock.rule
    if clock.separate:
        require(replaying is None, "refresh", clock, f"one for both sides with {replaying!r}, which sees both again")
        _check_placement(name not in _WHOLE, clock, placement, f"another than {' and '.join(map(repr, _WHOLE))}")
    if rule is None:
        return
    require(replaying is None, "refresh", clock, f"a natgrad.Refresh with {replaying!r}")
    alike = name != "pipelined" or not rule.stops
    _check_placement(alike, clock, placement, "another than 'pipelined', where all layers leave alike")


def _check_placement(fits: bool, clock: Clock, placement: Placement, allowed: str) -> None:
    require(fits, "placement", str(placement), f"{allowed}, with {clock!r}")
