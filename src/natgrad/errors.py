"""Exceptions, warnings, and checks of arguments."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])

PAGE = "https://natgrad.github.io/natgrad/trouble/"
"""The address of docs/trouble.md, which has a section for each warning and error."""

_ADDRESS = re.compile(rf"\. See ({re.escape(PAGE)}#[\w-]+)")


def with_address(message: str, anchor: str) -> str:
    """Return a message that ends in the address of a section of `PAGE`.

    If it quotes an error, it ends in the address of that one, which says more about the cause.
    """
    quoted = _ADDRESS.findall(message)
    return f"{_ADDRESS.sub('', message)}. See {quoted[0] if quoted else f'{PAGE}#{anchor}'}"


class NatgradError(Exception):
    """Base class of natgrad's errors other than ``ValueError``."""

    anchor: str = ""
    """The section of docs/trouble.md that a message refers to, if any."""

    def __init__(self, message: str = "", anchor: str = "") -> None:
        super().__init__(message)
        self.anchor = anchor or self.anchor

    def __str__(self) -> str:
        return with_address(super().__str__(), self.anchor) if self.anchor else super().__str__()


class CurvatureError(NatgradError):
    """The curvature of a layer stayed unusable for longer than the `Guard` allows."""

    anchor = "unusable-curvature"


class LostRankError(NatgradError):
    """A message could not be exchanged, because another rank has stopped, failed or skipped a step."""

    anchor = "lost-rank"


class AveragingError(NatgradError):
    """Averaging over nodes cannot continue: the ranks disagree, or the received values are not finite."""

    anchor = "averaging"


class DivergedError(AveragingError):
    """The average over nodes is not finite; raised on all ranks in the same step."""

    anchor = "diverged-average"


class ArgumentError(ValueError):
    """An argument that is not allowed.

    Attributes:
        name: The argument's name.
        value: The rejected value.
        allowed: A description of the allowed values.
        near: The result of `did_you_mean`.
    """

    anchor = "arguments"

    def __init__(self, name: str, value: Any, allowed: str, near: str = "") -> None:
        """Keep the parts, so that a caller can raise the error again under another name."""
        super().__init__(name, value, allowed, near)
        self.name, self.value, self.allowed, self.near = name, value, allowed, near

    def __str__(self) -> str:
        message = f"{self.name}={self.value!r} is not allowed{self.near}: {self.name} must be {self.allowed}"
        return with_address(message, self.anchor)

    def renamed(self, name: str) -> ArgumentError:
        """Return the same error about an argument of another name."""
        return type(self)(name, self.value, self.allowed, self.near)


class NatgradWarning(UserWarning):
    """Something works, but probably not as intended."""


def warn(message: str, anchor: str) -> None:
    """Give a `NatgradWarning` that ends in the address of its section of `PAGE`.

    It points at the innermost line outside of natgrad and torch, which wraps the `step` of optimizers.
    """
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("natgrad", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(with_address(message, anchor), NatgradWarning, stacklevel=level)


def require(condition: object, name: str, value: Any, allowed: str, near: str = "") -> None:
    """Raise an `ArgumentError` of these parts unless `condition` is true.

    Raises:
        ArgumentError: if `condition` is false.
    """
    if not condition:
        raise ArgumentError(name, value, allowed, near)


def require_one_of(name: str, value: Any, *choices: str, owner: str = "") -> None:
    """Raise an `ArgumentError` unless `value` is one of the `choices`, which may be options of an `owner`.

    Raises:
        ArgumentError: if it is not.
    """
    if isinstance(value, str) and value in choices:
        return
    *others, last = [*map(repr, choices)] or [""]
    listed = f"{', '.join(others)} or {last}" if others else last
    whose = f"one of {owner}'s: " if owner else ""
    allowed = f"{whose}{listed}" if choices else f"left out: {owner} has none"
    raise ArgumentError(name, value, allowed, did_you_mean(value, choices))


def did_you_mean(value: Any, choices: Iterable[str]) -> str:
    """Return the part of an error that names the choice nearest to `value`; empty if none is near."""
    lower = {choice.lower(): choice for choice in choices}
    near = ["lr"] if value == "learning_rate" and "lr" in lower else get_close_matches(str(value).lower(), lower, 1)
    return f" (did you mean {lower[near[0]]!r}?)" if near else ""


def with_suggestions(constructor: _Function) -> _Function:
    """Have the ``TypeError`` of an unknown keyword argument name the nearest known one, or else all.

    Args:
        constructor: The ``__init__`` of a class, or a class whose ``__init__`` is generated.
    """
    if isinstance(constructor, type):
        constructor.__init__ = with_suggestions(constructor.__init__)  # type: ignore[misc]
        return constructor
    known = list(inspect.signature(constructor).parameters)[1:]

    @wraps(constructor)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in (name for name in kwargs if name not in known):
            near = did_you_mean(name, known) or f"; known are {', '.join(known)}"
            message = f"{type(self).__name__}() got an unexpected keyword argument {name!r}{near}"
            raise TypeError(with_address(message, "arguments"))
        constructor(self, *args, **kwargs)

    return cast("_Function", checked)


def describe(value: Any) -> Any:
    """Return how an error message shows `value`: for a tensor its dtype, shape and whether it requires a gradient."""
    if not all(hasattr(value, name) for name in ("dtype", "shape", "requires_grad")):
        return value
    return f"{value.dtype}{list(value.shape)}{'' if value.requires_grad else ' without a graph'}"
