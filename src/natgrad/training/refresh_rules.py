"""Refresh rules by name."""

from __future__ import annotations

from natgrad.errors import ArgumentError, require
from natgrad.refresh import Adaptive, DriftRule, Refresh, RefreshRule, TraceRule

ALLOWED = "fixed, trace[:UPPER] or drift[:THRESHOLD]"


def build(refresh: str, *, factors: int, inverses: int) -> RefreshRule:
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
    require(name in ("trace", "drift"), "refresh", refresh, ALLOWED)
    try:
        if name == "trace":
            rule: RefreshRule = TraceRule(upper=float(bound)) if bound else TraceRule()
        else:
            rule = DriftRule(float(bound)) if bound else DriftRule()
    except ArgumentError as error:
        raise ArgumentError("refresh", refresh, f"{ALLOWED}, where {error.name} is {error.allowed}") from None
    except ValueError:
        raise ArgumentError("refresh", refresh, ALLOWED) from None
    return Adaptive(rule, factors=factors, inverses=inverses)
