"""What natgrad raises and warns, and the one way it checks an argument."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class NatgradError(Exception):
    """Base of the errors that natgrad raises beside ``ValueError``."""


class CurvatureError(NatgradError):
    """The curvature of a layer stayed unusable for longer than the `Guard` allows."""


class NatgradWarning(UserWarning):
    """Something works, though hardly as the user meant it."""


def require(condition: object, name: str, value: Any, allowed: str) -> None:
    """Raise a ``ValueError`` that names argument, value and what is allowed, unless `condition` holds.

    Raises:
        ValueError: if `condition` is false.
    """
    if not condition:
        raise ValueError(f"{name}={value!r} is not allowed: {name} must be {allowed}")


def describe(value: object) -> object:
    """Return what an error shows of `value`: of a tensor dtype, shape and whether it has a graph."""
    if not isinstance(value, Tensor):
        return value
    return f"{value.dtype}{list(value.shape)}{'' if value.requires_grad else ' without a graph'}"
