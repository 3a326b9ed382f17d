"""The curvature and the refresh rule of a job."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from natgrad.curvature import BY_NAME, Curvature
from natgrad.errors import ArgumentError, require
from natgrad.refresh import Adaptive, DriftRule, Refresh, RefreshRule, TraceRule


@contextmanager
def options_named(kind: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Add the kind of option to errors about one of `options`, as in "averaging option patience"."""
    try:
        yield
    except ArgumentError as error:
        if error.name not in options:
            raise
        raise ArgumentError(f"{kind} {error.name}", error.value, error.allowed) from error


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


def build(name: str, options: Mapping[str, Any], *, fisher: str | None, likelihood: str | None) -> Curvature:
    """Return a curvature.

    Args:
        name: Its name.
        options: Options of its constructor.
        fisher: "empirical" or "sampled"; None: "empirical", where there is a choice.
        likelihood: The distribution that labels are sampled from; None: there is none.

    Raises:
        ValueError: An option's value is not allowed.
    """
    check(name, options)
    if "fisher" not in inspect.signature(BY_NAME[name]).parameters:
        require(fisher is None, "fisher", fisher, f"left out: {name} has no choice")
        with options_named("curvature option", options):
            return BY_NAME[name](**options)
    fisher = fisher or "empirical"
    require(fisher != "sampled" or likelihood is not None, "fisher", fisher, "empirical: this loss has several terms")
    with options_named("curvature option", options):
        return BY_NAME[name](fisher=fisher, likelihood=likelihood if fisher == "sampled" else None, **options)


_REFRESH = "fixed, trace[:UPPER] or drift[:THRESHOLD]"


def refresh_rule(refresh: str, *, factors: int, inverses: int) -> RefreshRule:
    """Return the refresh rule of a run.

    Args:
        refresh: "fixed", or the name of a rule, optionally with a colon and its bound.
        factors: Steps between updates of the factors.
        inverses: Steps between decompositions, or with a rule between its decisions.

    Raises:
        ValueError: The rule is unknown, or the bound is not allowed.
    """
    if refresh == "fixed":
        return Refresh(factors=factors, inverses=inverses)
    name, _, bound = refresh.partition(":")
    require(name in ("trace", "drift"), "refresh", refresh, _REFRESH)
    try:
        if name == "trace":
            rule: RefreshRule = TraceRule(upper=float(bound)) if bound else TraceRule()
        else:
            rule = DriftRule(float(bound)) if bound else DriftRule()
    except ArgumentError as error:
        raise ArgumentError("refresh", refresh, f"{_REFRESH}, where {error.name} is {error.allowed}") from None
    except ValueError:
        raise ArgumentError("refresh", refresh, _REFRESH) from None
    return Adaptive(rule, factors=factors, inverses=inverses)
