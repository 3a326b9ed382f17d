"""Schedules of the learning rate by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, ReduceLROnPlateau

from natgrad.errors import require, require_one_of
from natgrad.recipes import PolynomialDecay
from natgrad.schedule import check_number, check_whole

from .curvatures import check_milestones, check_options, options_named

ScheduleName = Literal["constant", "cosine", "polynomial", "step", "plateau"]

# Options that all schedules have.
WARM_UP = ("warmup_epochs", "warmup_lr")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "cosine": (),
    "polynomial": ("start", "end", "power", "momentum"),
    "step": ("milestones", "factor"),
    "plateau": ("factor", "patience", "threshold"),
}


class Plateau:
    """A linear warm-up, and a smaller learning rate when the loss of an epoch has stopped falling.

    Args:
        optimizer: The optimizer; its learning rate is the peak.
        start: The share of the peak in the first step.
        rise: The steps from there to the peak.
        factor: The factor of the learning rate.
        patience: The epochs without progress after which it falls.
        threshold: Progress is a decrease of the least loss by this share.
    """

    def __init__(
        self, optimizer: Optimizer, *, start: float, rise: int, factor: float, patience: int, threshold: float
    ) -> None:
        self._optimizer = optimizer
        self._warm_up = LinearLR(optimizer, start_factor=start, total_iters=rise)
        self._plateau = ReduceLROnPlateau(optimizer, factor=factor, patience=patience, threshold=threshold)

    def step(self) -> None:
        """Go on to the next step."""
        self._warm_up.step()

    def end_epoch(self, loss: float) -> None:
        """Take the mean training loss of an epoch, which must be equal on all ranks."""
        self._plateau.step(loss)

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"warm_up": self._warm_up.state_dict(), "plateau": self._plateau.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        self._warm_up.load_state_dict(state["warm_up"])
        self._plateau.load_state_dict(state["plateau"])


def check(name: str, options: Mapping[str, Any], *, warmup: int = 0) -> None:
    """Check a schedule and its options.

    Raises:
        ValueError: The name, an option or its value is not allowed.
    """
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    build(optimizer, name, options, warmup=warmup, steps=10**9, steps_per_epoch=10**6)


def build(
    optimizer: Optimizer,
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    warmup: int,
    steps: int,
    steps_per_epoch: int,
) -> LRScheduler | Plateau:
    """Return the scheduler of the learning rate over a run.

    Args:
        optimizer: The optimizer; its learning rate is the peak.
        name: "constant"; "cosine", which falls to zero; "polynomial"; "step"; or "plateau".
        options: Epochs count from the start of the run and need not be whole.

            All have `warmup_epochs`, in place of `warmup`, and `warmup_lr`, the learning rate of the first step (at
            most the peak; None: the peak divided by the steps of the warm-up).

            "polynomial" has `start` (an epoch; None: the end of the warm-up), `end` (an epoch; None: the end of the
            run), `power` and `momentum`, whether the momentum falls like the learning rate (Osawa 2019, eq. 18).

            "step" has `milestones` (epochs; None: the middle and three quarters of the time after the warm-up) and
            `factor`, by which the learning rate is multiplied at each.

            "plateau" has `factor`, `patience` and `threshold`, as `torch.optim.lr_scheduler.ReduceLROnPlateau` has, on
            the mean training loss of an epoch over all ranks.
        warmup: Steps of a linear warm-up.
        steps: Steps of the run, including the warm-up.
        steps_per_epoch: Steps of an epoch.

    Raises:
        ValueError: The name, an option or its value is not allowed.
    """
    options = options or {}
    require_one_of("schedule", name, *get_args(ScheduleName))
    allowed = (*WARM_UP, *_OPTIONS[name])
    check_options("schedule", name, options, allowed)
    with options_named("schedule option", dict.fromkeys(allowed)):
        return _build(optimizer, name, options, warmup=warmup, steps=steps, steps_per_epoch=steps_per_epoch)


def _build(
    optimizer: Optimizer, name: str, options: Mapping[str, Any], *, warmup: int, steps: int, steps_per_epoch: int
) -> LRScheduler | Plateau:
    epochs, first = options.get("warmup_epochs"), options.get("warmup_lr")
    if epochs is not None:
        check_number("warmup_epochs", epochs, "a number >= 0", minimum=0)
        require(not warmup, "warmup_epochs", epochs, f"left out beside warmup={warmup}")
        warmup = round(epochs * steps_per_epoch)
    # The rate rises from the share `start` in step 0 to 1 in step `rise`.
    start, rise = 1 / max(warmup, 1), max(warmup - 1, 0)
    if first is not None:
        check_number("warmup_lr", first, "a number > 0", minimum=0, strict=True)
        start, rise = min(1.0, first / max(float(group["lr"]) for group in optimizer.param_groups)), warmup

    if name == "plateau":
        factor, patience = _factor(options), options.get("patience", 10)
        check_whole("patience", patience, 0)
        threshold = options.get("threshold", 1e-4)
        check_number("threshold", threshold, "a number >= 0", minimum=0)
        return Plateau(
            optimizer,
            start=start if warmup else 1.0,
            rise=rise,
            factor=factor,
            patience=patience,
            threshold=threshold,
        )
    if name == "polynomial" and options.get("momentum", False):
        require(not warmup, "momentum", True, "False beside a warm-up")
        has_momentum = any("momentum" in group for group in optimizer.param_groups)
        require(has_momentum, "momentum", True, "False for an optimizer without momentum")
        begin, end, power = _polynomial(options, warmup, steps, steps_per_epoch)
        return PolynomialDecay(optimizer, start=begin, end=end, power=power)
    after = _after_warm_up(name, options, warmup, steps, steps_per_epoch)

    def factor_at(step: int) -> float:
        if step >= warmup:
            return after(step)
        return (step + 1) / warmup if first is None else start + (1 - start) * step / rise

    return LambdaLR(optimizer, factor_at)


def _after_warm_up(
    name: str, options: Mapping[str, Any], warmup: int, steps: int, steps_per_epoch: int
) -> Callable[[int], float]:
    """Return the factor of the learning rate as a function of the step."""
    if name == "constant":
        return lambda step: 1.0
    if name == "polynomial":
        begin, end, power = _polynomial(options, warmup, steps, steps_per_epoch)
        return lambda step: float(min(max((end - step) / (end - begin), 0.0), 1.0) ** power)

    def done(step: int) -> float:
        return min((step - warmup) / max(steps - warmup, 1), 1.0)

    if name == "cosine":
        return lambda step: (1 + math.cos(math.pi * done(step))) / 2
    factor, milestones = _factor(options), options.get("milestones")
    if milestones is None:
        return lambda step: float(factor ** ((done(step) >= 0.5) + (done(step) >= 0.75)))
    check_milestones(milestones)
    falls = [round(epoch * steps_per_epoch) for epoch in milestones]
    return lambda step: float(factor ** sum(step >= fall for fall in falls))


def _polynomial(
    options: Mapping[str, Any], warmup: int, steps: int, steps_per_epoch: int
) -> tuple[float, float, float]:
    """Return the first and the last step of the decay, and its power."""
    start, end, power = options.get("start"), options.get("end"), options.get("power", 1.0)
    momentum = options.get("momentum", False)
    require(isinstance(momentum, bool), "momentum", momentum, "True or False")
    if start is not None:
        check_number("start", start, "an epoch >= 0", minimum=0)
    if end is not None:
        check_number("end", end, "an epoch > 0", minimum=0, strict=True)
    begin = warmup if start is None else start * steps_per_epoch
    last = steps if end is None else end * steps_per_epoch
    check_number("power", power, "a number > 0", minimum=0, strict=True)
    require(end is None or last > begin, "end", end, "an epoch after the start of the decay")
    return begin, max(last, begin + 1) if end is None else last, power


def _factor(options: Mapping[str, Any]) -> float:
    factor = options.get("factor", 0.1)
    check_number("factor", factor, "a number in (0, 1)", minimum=0, strict=True)
    require(factor < 1, "factor", factor, "a number in (0, 1)")
    return float(factor)
