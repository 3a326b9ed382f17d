"""What natgrad raises and warns, and the one way it checks an argument."""

from __future__ import annotations

from typing import Any


class NatgradError(Exception):
    """Base of the errors that natgrad raises beside ``ValueError``."""


class CurvatureError(NatgradError):
    """The curvature of a layer stayed unusable for longer than the `Guard` allows."""


class AveragingError(NatgradError):
    """Averaging over nodes cannot go on: the ranks differ, or what arrived is not finite."""


class DivergedError(AveragingError):
    """What the nodes have averaged is not finite; raised on all ranks in the same step."""


class ArgumentError(ValueError):
    """An argument that is not allowed.

    Attributes:
        name: Of the argument.
        value: What was given.
        allowed: What must be given instead, in words.
    """

    def __init__(self, name: str, value: Any, allowed: str) -> None:
        """Keep the parts: whoever knows the argument by another name can say so."""
        super().__init__(name, value, allowed)
        self.name, self.value, self.allowed = name, value, allowed

    def __str__(self) -> str:
        """Return one sentence of all parts."""
        return f"{self.name}={self.value!r} is not allowed: {self.name} must be {self.allowed}"


class NatgradWarning(UserWarning):
    """Something works, though hardly as the user meant it."""


def require(condition: object, name: str, value: Any, allowed: str) -> None:
    """Raise a ``ValueError`` that names argument, value and what is allowed, unless `condition` holds.

    Raises:
        ArgumentError: if `condition` is false.
    """
    if not condition:
        raise ArgumentError(name, value, allowed)


def require_one_of(name: str, value: Any, *allowed: str) -> None:
    """Raise a ``ValueError``, as `require` does, unless `value` is one of some words.

    Raises:
        ArgumentError: if it is not.
    """
    *others, last = map(repr, allowed)
    require(isinstance(value, str) and value in allowed, name, value, f"{', '.join(others)} or {last}")


def describe(value: Any) -> Any:
    """Return what an error shows of `value`: of a tensor dtype, shape and whether it has a graph."""
    if not all(hasattr(value, each) for each in ("dtype", "shape", "requires_grad")):
        return value
    return f"{value.dtype}{list(value.shape)}{'' if value.requires_grad else ' without a graph'}"
