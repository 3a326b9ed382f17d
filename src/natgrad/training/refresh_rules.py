"""Refresh rules by name."""

from __future__ import annotations

from dataclasses import fields

from natgrad.errors import ArgumentError, require
from natgrad.refresh import Adaptive, BasisRule, Capped, DriftRule, Refresh, RefreshRule, TraceRule
from natgrad.refresh.rule import By

_RULES: dict[str, type[TraceRule] | type[DriftRule] | type[BasisRule]] = {
    "trace": TraceRule,
    "drift": DriftRule,
    "basis": BasisRule,
}

ALLOWED = "fixed, trace[:UPPER,LOWER], drift[:THRESHOLD] or basis[:TOLERANCE]"


def build(refresh: str, *, factors: int, inverses: int, by: By = "layer", share: float | None = None) -> RefreshRule:
    """Return the refresh rule of a run.

    Args:
        refresh: "fixed", or the name of a rule, optionally with a colon and its bounds.
        factors: Steps between updates of the factors.
        inverses: Steps between decompositions, or with a rule between its decisions.
        by: The unit of a rule's decisions, "layer" or "factor".
        share: The largest share of the time for preconditioning; None: no limit.

    Raises:
        ValueError: The rule is unknown, or a bound, `by` or the share is not allowed.
    """
    name, _, given = refresh.partition(":")
    policy: RefreshRule = Refresh(factors=factors, inverses=inverses)
    require(by == "layer" or refresh != "fixed", "by", by, "'layer' without a rule")
    if refresh != "fixed":
        require(name in _RULES, "refresh", refresh, ALLOWED)
        rule, bounds = _RULES[name], given.split(",") if given else []
        names = [field.name for field in fields(rule)]
        require(len(bounds) <= len(names), "refresh", refresh, ALLOWED)
        try:
            chosen = rule(**{bound: float(value) for bound, value in zip(names, bounds, strict=False)})
        except ArgumentError as error:
            raise ArgumentError("refresh", refresh, f"{ALLOWED}, where {error.name} is {error.allowed}") from None
        except ValueError:
            raise ArgumentError("refresh", refresh, ALLOWED) from None
        policy = Adaptive(chosen, by=by, factors=factors, inverses=inverses)
    return policy if share is None else Capped(refresh=policy, share=share)
