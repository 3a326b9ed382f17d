"""The arguments of `natgrad.DASO`, checked before anything is touched."""

from __future__ import annotations

import warnings
from math import inf
from typing import Any

import torch

from natgrad.averaging.schedule import Phases
from natgrad.errors import NatgradWarning, require, require_one_of
from natgrad.optimizer import PreconditionedOptimizer
from natgrad.preconditioner import Preconditioner


def check_options(
    *,
    batches_between: object,
    batches_to_wait: object,
    merge: object,
    wire: object,
    cycling_wire: object,
    momentum: object,
) -> None:
    """Check the arguments of `natgrad.DASO` of these names.

    Raises:
        ValueError: naming the first that is not allowed, its value and what is.
    """
    for name, value in (("batches_between", batches_between), ("batches_to_wait", batches_to_wait)):
        require(isinstance(value, int) and not isinstance(value, bool), name, value, "a whole number")
    require_one_of("merge", merge, "paper", "delta")
    for name, dtype in (("wire", wire), ("cycling_wire", cycling_wire)):
        fits = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
        require(fits, name, dtype, "a floating dtype such as torch.bfloat16, or None")
    require_one_of("momentum", momentum, "keep", "average", "reset")


def chosen_preconditioner(optimizer: object, preconditioner: object) -> Preconditioner | None:
    """Return the preconditioner: the one given, or that of a `natgrad.PreconditionedOptimizer`.

    Raises:
        ValueError: if it is none, or another than the optimizer's.
    """
    fits = preconditioner is None or isinstance(preconditioner, Preconditioner)
    require(fits, "preconditioner", type(preconditioner).__name__, "a natgrad.Preconditioner, or None")
    if isinstance(optimizer, PreconditionedOptimizer):
        fits = preconditioner is None or preconditioner is optimizer.preconditioner
        require(fits, "preconditioner", preconditioner, "left out beside a PreconditionedOptimizer")
        return optimizer.preconditioner
    return preconditioner if isinstance(preconditioner, Preconditioner) else None


def phases_of(epochs: Any, steps: Any, warmup: Any, cooldown: Any) -> Phases:
    """Return the phases in epochs, or in steps where the length of an epoch is known.

    Args:
        epochs: As `natgrad.DASO` takes it; so are the others.
        steps: That of an epoch.
        warmup: In epochs.
        cooldown: In epochs.

    Raises:
        ValueError: naming the first that is not allowed.
    """
    fits = steps is None or (isinstance(steps, int) and not isinstance(steps, bool) and steps > 0)
    require(fits, "steps_per_epoch", steps, "a whole number > 0, or None")
    kinds = (int,) if steps is None else (int, float)
    for name, value, least in (
        ("epochs", epochs, 1e-9),
        ("warmup_epochs", warmup, 0),
        ("cooldown_epochs", cooldown, 0),
    ):
        fits = isinstance(value, kinds) and not isinstance(value, bool) and least <= value < inf
        fits = fits or value is None
        require(fits, name, value, f"None, or a number {'above' if least else '>='} 0 (whole without steps_per_epoch)")
    usual = max(1, epochs // 10) if epochs is not None and epochs >= 3 else 0
    warmup = usual if warmup is None else warmup
    cooldown = usual if cooldown is None else cooldown
    if epochs is None and cooldown:
        told = f"cooldown_epochs = {cooldown} is counted from the end, and epochs is not given: there is no cool-down"
        warnings.warn(f"natgrad: {told}", NatgradWarning, stacklevel=4)
        cooldown = 0
    fits = epochs is None or warmup + cooldown <= epochs
    require(fits, "warmup_epochs + cooldown_epochs", warmup + cooldown, f"at most epochs ({epochs})")
    unit = 1 if steps is None else steps
    return Phases(
        total=None if epochs is None else round(epochs * unit),
        warmup=round(warmup * unit),
        cooldown=round(cooldown * unit),
    )
