"""The names by which refresh rules can be chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from natgrad.errors import require, require_one_of
from natgrad.refresh.criteria import BasisRule, DriftRule, TraceRule
from natgrad.refresh.policy import Capped, Refresh
from natgrad.refresh.rule import Measure, RefreshRule, check_by
from natgrad.schedule import check_number

_RULES: dict[str, Callable[[], RefreshRule]] = {
    "fixed": Refresh,
    "trace": TraceRule,
    "drift": DriftRule,
    "basis": BasisRule,
    "capped": Capped,
}


def register_refresh(name: str, make: Callable[[], RefreshRule]) -> None:
    """Register a rule, so that ``Preconditioner(model, refresh=name)`` takes it; an instance needs no registration.

    Every process that builds the preconditioner has to register it.

    Args:
        name: The name.
        make: Returns the rule when called without arguments, as a class does whose options have defaults.

    Raises:
        ValueError: if `name` is not text, or is taken, or `make` cannot be called.
    """
    require(isinstance(name, str) and name, "name", name, "a text")
    require(callable(make), "make", make, "a subclass of natgrad.RefreshRule, or a function that returns an instance")
    require(_RULES.get(name, make) is make, "name", name, f"a name that is free, unlike {', '.join(_RULES)}")
    _RULES[name] = make


def resolve_refresh(refresh: object) -> RefreshRule:
    """Return the rule that the argument `refresh` of `natgrad.Preconditioner` stands for.

    Args:
        refresh: The rule itself, or its registered name.

    Raises:
        ValueError: if it is neither, or the rule has attributes that are not allowed.
    """
    allowed = "a natgrad.Refresh, natgrad.Adaptive or natgrad.Capped, another natgrad.RefreshRule, or one of the names "
    allowed += ", ".join(_RULES)
    if isinstance(refresh, str):
        require(refresh in _RULES, "refresh", refresh, allowed)
        refresh = _RULES[refresh]()
    require(isinstance(refresh, RefreshRule), "refresh", refresh, allowed)
    assert isinstance(refresh, RefreshRule)
    criterion, name = refresh.criterion, type(refresh).__name__
    if refresh.share is not None:
        check_number(f"{name}.share", refresh.share, "a number in (0, 1)", minimum=0, strict=True)
        require(refresh.share < 1, f"{name}.share", refresh.share, "a number in (0, 1)")
    if criterion is not None:
        require_one_of(f"{type(criterion).__name__}.measure", criterion.measure, *get_args(Measure))
        check_by(f"{name}.by", refresh.by, criterion)
    return refresh
