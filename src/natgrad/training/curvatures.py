"""Any curvature by its name and the options of its constructor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from natgrad import EKFAC, KBFGS, KFAC, SNGD, HyLo, RankOne
from natgrad.curvature import Curvature
from natgrad.errors import require

from .naming import options_named

_CLASSES: dict[str, Callable[..., Curvature]] = {
    "kfac": KFAC,
    "ekfac": EKFAC,
    "kbfgs": KBFGS,
    "sngd": SNGD,
    "hylo": HyLo,
    "rank-one": RankOne,
}

# What the job has a field of, or the task decides.
_APART = ("fisher", "likelihood")


def names() -> list[str]:
    """Return the names of all curvatures."""
    return list(_CLASSES)


def options_of(name: str) -> list[str]:
    """Return the options that a curvature takes beside the Fisher's."""
    return [option for option in inspect.signature(_CLASSES[name]).parameters if option not in _APART]


def default_damping(name: str) -> float:
    """Return the damping that a curvature has of its own."""
    kind: Any = _CLASSES[name]
    return float(kind.default_damping)


def check(name: str, options: Mapping[str, Any]) -> None:
    """Check that a curvature has such options.

    Raises:
        ValueError: It has not, or there is no such curvature.
    """
    require(name in _CLASSES, "curvature", name, f"one of none, {', '.join(_CLASSES)}")
    allowed = options_of(name)
    for option in options:
        what = f"one of {name}'s: {', '.join(allowed)}" if allowed else f"left out: {name} has none"
        require(option in allowed, "curvature option", option, what)


def build(name: str, options: Mapping[str, Any], *, fisher: str | None, likelihood: str) -> Curvature:
    """Return a curvature.

    Args:
        name: One of `names()`.
        options: Those of its constructor.
        fisher: "empirical" or "sampled"; None: the latter, where the curvature has the choice.
        likelihood: What sampled labels are drawn from.

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
