"""Curvatures by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from natgrad import EKFAC, KBFGS, KFAC, SNGD, HyLo, RankOne
from natgrad.curvature import Curvature
from natgrad.errors import require

from .option_errors import options_named

_CLASSES: dict[str, Callable[..., Curvature]] = {
    "kfac": KFAC,
    "ekfac": EKFAC,
    "kbfgs": KBFGS,
    "sngd": SNGD,
    "hylo": HyLo,
    "rank-one": RankOne,
}

# Options that are fields of the job, or set by the task.
_EXCLUDED = ("fisher", "likelihood")


def options_of(name: str) -> list[str]:
    """Return the options of a curvature, without those of the Fisher."""
    return [option for option in inspect.signature(_CLASSES[name]).parameters if option not in _EXCLUDED]


def default_damping(name: str) -> float:
    """Return the default damping of a curvature."""
    kind: Any = _CLASSES[name]
    return float(kind.default_damping)


def check(name: str, options: Mapping[str, Any]) -> None:
    """Check the name of a curvature, and the names of its options.

    Raises:
        ValueError: A name is unknown.
    """
    require(name in _CLASSES, "curvature", name, f"one of none, {', '.join(_CLASSES)}")
    allowed = options_of(name)
    for option in options:
        what = f"one of {name}'s: {', '.join(allowed)}" if allowed else f"left out: {name} has none"
        require(option in allowed, "curvature option", option, what)


def build(name: str, options: Mapping[str, Any], *, fisher: str | None, likelihood: str) -> Curvature:
    """Return a curvature.

    Args:
        name: Its name.
        options: Options of its constructor.
        fisher: "empirical" or "sampled"; None: "sampled" if the curvature supports it.
        likelihood: The distribution that labels are sampled from.

    Raises:
        ValueError: An option's value is not allowed.
    """
    check(name, options)
    if "fisher" not in inspect.signature(_CLASSES[name]).parameters:
        require(fisher is None, "fisher", fisher, f"left out: {name} has no choice")
        with options_named("curvature option", options):
            return _CLASSES[name](**options)
    fisher = fisher or "sampled"
    with options_named("curvature option", options):
        return _CLASSES[name](fisher=fisher, likelihood=likelihood if fisher == "sampled" else None, **options)
