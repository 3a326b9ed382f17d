"""Check that ``preconditioner.step()`` comes between the backward pass and ``optimizer.step()``."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch

from natgrad.errors import NatgradWarning
from natgrad.preconditioner.gradients.written import WrittenGradients

if TYPE_CHECKING:
    from natgrad.preconditioner import Preconditioner


class CallOrder:
    """Observes the steps of the optimizer with a hook that runs before them.

    It never waits for the device. Neither the optimizer nor the hook keeps the preconditioner alive.
    """

    def __init__(self, preconditioner: Preconditioner) -> None:
        """Register the hook, if the preconditioner has an optimizer that supports hooks."""
        self._preconditioner = weakref.ref(preconditioner)
        self._used = WrittenGradients()  # gradients that the optimizer used although they were not preconditioned
        self._last_step, self._optimizer_steps = -1, 0
        self._warned_of_forgotten = self._warned_of_late = False
        own = weakref.ref(self)

        def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_compiling():
                return
            order = own()
            if order is not None:
                order._before_optimizer_step(optimizer)

        # A subclass of Optimizer that has not called its constructor has no hooks.
        optimizer = preconditioner.optimizer
        self._handle = (
            optimizer.register_step_pre_hook(look) if hasattr(optimizer, "_optimizer_step_pre_hooks") else None  # type: ignore[union-attr]
        )
        if self._handle is not None:
            weakref.finalize(self, self._handle.remove).atexit = False

    def detach(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()

    def check(self) -> None:
        """Warn once if the optimizer has already used the present gradients."""
        late, self._used = self._used.untouched(), WrittenGradients()
        if late and not self._warned_of_late:
            self._warned_of_late = True
            warnings.warn(
                "natgrad: preconditioner.step() comes after optimizer.step(), which has used the gradients as they "
                "were: call backward(), then preconditioner.step(), then optimizer.step()",
                NatgradWarning,
                stacklevel=5,  # the caller of `step`
            )

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        preconditioner = self._preconditioner()
        if preconditioner is None or not self._are_new(preconditioner) or _changes_nothing(optimizer):
            return
        self._used.note(preconditioner.parts.groups)
        if not self._warned_of_forgotten:
            self._warned_of_forgotten = True
            warnings.warn(
                "natgrad: optimizer.step() uses gradients that were never preconditioned: call preconditioner.step() "
                "after each backward() and before each optimizer.step(); if these steps are the optimizer's on "
                "purpose, as in a warm-up, all is well",
                NatgradWarning,
                stacklevel=4,  # the caller of the optimizer's step
            )

    def _are_new(self, preconditioner: Preconditioner) -> bool:
        """Return whether a backward pass has written gradients since the preconditioner's last step."""
        step = preconditioner.parts.progress.step
        self._optimizer_steps = self._optimizer_steps + 1 if step == self._last_step else 1
        self._last_step = step
        capture, given = preconditioner.parts.capture, preconditioner.parts.given
        if capture.idle or all(parameter.grad is None for parameter in preconditioner.parameters()):
            return False
        if capture.backwards and capture.fills:
            return True
        # In steps without statistics the hooks see the forward pass only. New tensors in ``.grad`` come from a
        # backward pass; changed ones may come from clipping, but not before the optimizer's next step.
        return given.replaced() or (self._optimizer_steps > 1 and not given.untouched())


def _changes_nothing(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all learning rates are 0, as in the step with which torch's checkpoints initialise a state."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return all(isinstance(rate, (int, float)) and rate == 0 for rate in rates)
