"""The curvature of a job."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from natgrad.curvature import Curvature
from natgrad.curvature.names import BY_NAME
from natgrad.errors import require

from .option_errors import options_named

# Options that are fields of the job, or set by the task.
_EXCLUDED = ("fisher", "likelihood")


def options_of(name: str) -> list[str]:
    """Return the options of a curvature, without those of the Fisher."""
    return [option for option in inspect.signature(BY_NAME[name]).parameters if option not in _EXCLUDED]


def default_damping(name: str) -> float:
    """Return the default damping of a curvature."""
    kind: Any = BY_NAME[name]
    return float(kind.default_damping)


def check(name: str, options: Mapping[str, Any]) -> None:
    """Check the name of a curvature, and the names of its options.

    Raises:
        ValueError: A name is unknown.
    """
    require(name in BY_NAME, "curvature", name, f"one of none, {', '.join(BY_NAME)}")
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
    if "fisher" not in inspect.signature(BY_NAME[name]).parameters:
        require(fisher is None, "fisher", fisher, f"left out: {name} has no choice")
        with options_named("curvature option", options):
            return BY_NAME[name](**options)
    fisher = fisher or "sampled"
    with options_named("curvature option", options):
        return BY_NAME[name](fisher=fisher, likelihood=likelihood if fisher == "sampled" else None, **options)
