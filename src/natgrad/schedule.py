"""Hyper-parameters that may change with the step: a number, or a callable of the step."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeAlias, TypeGuard

from natgrad.errors import ArgumentError, require

# The largest number of float32, in which torch multiplies by it.
_LARGEST = (2 - 2**-23) * 2.0**127

Schedule: TypeAlias = float | Callable[[int], float]


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a finite ``int`` or ``float`` in the range of float32."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST


def check_number(name: str, value: object, allowed: str, *, minimum: float, strict: bool = False) -> None:
    """Check that `value` is a finite number of at least (`strict`: above) `minimum`.

    Raises:
        ValueError: if it is not.
    """
    require(is_number(value) and (value > minimum if strict else value >= minimum), name, value, allowed)


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether `value` is an ``int``, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_whole(name: str, value: object, least: int, most: int | None = None, *, optional: bool = False) -> None:
    """Check that `value` is a whole number from `least` to `most`, or, if it is `optional`, None.

    Raises:
        ValueError: if it is not.
    """
    fits = is_whole(value) and value >= least and (most is None or value <= most)
    allowed = f"a whole number >= {least}" + ("" if most is None else f" and <= {most}")
    require(fits or (optional and value is None), name, value, allowed + (", or None" if optional else ""))


def check_schedule(name: str, schedule: object, allowed: str, *, minimum: float, strict: bool = False) -> None:
    """Check a schedule before training: a number is checked now, a callable when `value_at` calls it.

    Raises:
        ValueError: if it is neither a permitted number nor a callable of one argument, or if it is a class or a module.
    """
    if not _takes_step(schedule):
        check_number(name, schedule, f"{allowed}, or a callable of the step", minimum=minimum, strict=strict)


def _takes_step(schedule: object) -> bool:
    if not callable(schedule) or isinstance(schedule, type) or hasattr(schedule, "named_parameters"):
        return False
    try:
        signature(schedule).bind(0)
    except TypeError:
        return False
    except ValueError:  # some callables have no signature
        return True
    return True


def value_at(name: str, schedule: Schedule, step: int, allowed: str, *, minimum: float, strict: bool = False) -> float:
    """Return the value of `schedule` at `step` (the number of completed steps), checked.

    Raises:
        ValueError: if it is not a permitted number.
    """
    if not callable(schedule):
        return float(schedule)
    value: Any = schedule(step)
    value = value.item() if getattr(value, "ndim", None) == 0 else value  # a torch or NumPy scalar
    if not (is_number(value) and (value > minimum if strict else value >= minimum)):
        raise ArgumentError(name, value, f"{allowed} (at step {step})")
    return float(value)
