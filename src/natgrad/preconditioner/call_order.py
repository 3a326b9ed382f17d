"""Check the order of calls: backward pass, ``preconditioner.step()``, ``optimizer.step()``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from natgrad.capture import Capture
from natgrad.errors import NatgradError, warn
from natgrad.layers import Slot
from natgrad.preconditioner.structure import Structure
from natgrad.state.counters import StepCounters


class GradientVersions:
    """Records which tensors are the gradients, and finds out whether they have changed since. Holds weak references."""

    _every: ClassVar[weakref.WeakSet[GradientVersions]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._versions: list[tuple[Slot, weakref.ref[Tensor], int]] = []
        self._every.add(self)

    def note(self, slots: Iterable[Slot]) -> None:
        """Record the present gradients."""
        self._versions = [
            (slot, weakref.ref(gradient), gradient._version)
            for slot in slots
            if (gradient := slot.parameter.grad) is not None
        ]

    def remain(self) -> bool:
        """Return whether any of these tensors is still a parameter's ``.grad``, whatever its values."""
        return any(known() is not None and known() is slot.parameter.grad for slot, known, _ in self._versions)

    def untouched(self) -> bool:
        """Return whether there are recorded gradients and none has been changed."""
        return bool(self._versions) and all(map(_is_unchanged, self._versions))

    def of_another(self, structure: Structure) -> bool:
        """Return whether another preconditioner has recorded a gradient of these layers that has not changed since."""
        others = [entry for other in self._every if other is not self for entry in other._versions]
        ids = {id(slot.parameter) for slot in structure.slots} if others else set()
        return any(id(entry[0].parameter) in ids and _is_unchanged(entry) for entry in others)


def _is_unchanged(entry: tuple[Slot, weakref.ref[Tensor], int]) -> bool:
    slot, known, version = entry
    gradient = known()
    return gradient is not None and gradient is slot.parameter.grad and gradient._version == version


class CallOrder:
    """Warns once of each of two mistakes, without waiting for the device.

    Attributes:
        written: The gradients that the preconditioner's last step wrote.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        capture: Capture,
        structure: Structure,
        progress: StepCounters,
        *,
        always_steps: bool,
    ) -> None:
        """Register a hook before the optimizer's steps, which does not keep this object alive.

        `always_steps`: a rank without a backward pass takes part in every step.
        """
        self._capture, self._structure, self._progress = capture, structure, progress
        self._always_steps = always_steps
        self.written = GradientVersions()
        self._warned: set[str] = set()
        reference = weakref.ref(self)

        def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            order = None if torch.compiler.is_compiling() else reference()
            if order is not None:
                order._before_optimizer_step(optimizer)

        # A subclass of Optimizer that has not called its constructor has no hooks.
        self._handle = (
            optimizer.register_step_pre_hook(look) if hasattr(optimizer, "_optimizer_step_pre_hooks") else None  # type: ignore[union-attr]
        )
        if self._handle is not None:
            weakref.finalize(self, self._handle.remove).atexit = False

    def detach(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()

    def check_others(self) -> None:
        """Raise a `NatgradError` if another preconditioner has preconditioned the gradients."""
        if self.written.of_another(self._structure):
            raise NatgradError(
                "another Preconditioner, or another optimizer of natgrad, has already preconditioned these gradients: "
                "step with one of them alone",
                "order-of-calls",
            )

    def check(self) -> bool:
        """Return whether there may be new gradients; warn if no backward pass precedes this step."""
        if not self._capture.idle:
            return True
        slots, always = self._structure.slots, self._always_steps
        untouched = self.written.untouched()
        # Later the hooks need not see every pass.
        is_late = not self._progress.has_curvature or all(slot.parameter.grad is None for slot in slots)
        if untouched or (is_late and not always):
            self._warn_once(
                "step() comes without a backward pass since the last one, or its layers saw none: call "
                "step() once after each loss.backward(), and build the Preconditioner, or the optimizer that holds it, "
                "before the forward pass",
                "no-backward-pass",
            )
        return always or not untouched

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        capture = self._capture
        if capture.backwards and capture.fills and not _changes_nothing(optimizer):
            self._warn_once(
                "optimizer.step() uses gradients that were never preconditioned: call preconditioner.step() after each "
                "backward() and before each optimizer.step(); if these steps are the optimizer's on purpose, as in a "
                "warm-up, all is well",
                "not-preconditioned",
            )

    def _warn_once(self, message: str, anchor: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn(f"natgrad: {message}", anchor)


def _changes_nothing(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all learning rates are 0, as in the step with which torch's checkpoints initialise a state."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return all(isinstance(rate, (int, float)) and rate == 0 for rate in rates)
