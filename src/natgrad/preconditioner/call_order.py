"""Check the order of calls: backward pass, ``preconditioner.step()``, ``optimizer.step()``."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from natgrad.errors import NatgradWarning
from natgrad.layers import Slot
from natgrad.preconditioner.parts import Parts
from natgrad.versions import BLIND


class GradientVersions:
    """Records which tensors are the gradients, and finds out whether they have changed since. Holds weak references."""

    def __init__(self) -> None:
        """Start without gradients."""
        self._versions: list[tuple[Slot, weakref.ref[Tensor], int]] = []

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

    def replaced(self) -> bool:
        """Return whether any gradient is a new tensor, or none was recorded."""
        return not self._versions or any(
            slot.parameter.grad is not None and known() is not slot.parameter.grad for slot, known, _ in self._versions
        )

    def untouched(self) -> bool:
        """Return whether there are recorded gradients and none has been changed."""
        return bool(self._versions) and all(
            (gradient := known()) is not None and gradient is slot.parameter.grad and gradient._version == version
            for slot, known, version in self._versions
        )


class CallOrder:
    """Warns once of each mistake. Observes the optimizer with a hook before its steps, and never waits for the device.

    Attributes:
        written: The gradients that the preconditioner's last step wrote.
    """

    def __init__(self, parts: Parts) -> None:
        """Register the hook, if there is an optimizer that supports hooks. The hook does not keep this object alive."""
        self._parts = parts
        self.written = GradientVersions()
        self._used = GradientVersions()  # gradients that the optimizer used although they were not preconditioned
        self._last_step, self._optimizer_steps = -1, 0
        self._warned: set[str] = set()
        reference = weakref.ref(self)

        def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_compiling():
                return
            order = reference()
            if order is not None:
                order._before_optimizer_step(optimizer)

        # A subclass of Optimizer that has not called its constructor has no hooks.
        optimizer = parts.clip.optimizer
        self._handle = (
            optimizer.register_step_pre_hook(look) if hasattr(optimizer, "_optimizer_step_pre_hooks") else None  # type: ignore[union-attr]
        )
        if self._handle is not None:
            weakref.finalize(self, self._handle.remove).atexit = False

    def detach(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()

    def check(self) -> bool:
        """Check that a backward pass precedes this step, and the optimizer's step does not.

        Returns:
            Whether there are new gradients.
        """
        parts, slots = self._parts, self._parts.structure.slots
        late, self._used = self._used.untouched(), GradientVersions()
        if late:
            self._warn_once(
                "preconditioner.step() comes after optimizer.step(), which has used the gradients as they were: call "
                "backward(), then preconditioner.step(), then optimizer.step()"
            )
        if not parts.capture.idle:
            return True
        # With gradients="reduce" a rank without samples has no backward pass, and still takes part.
        if not (parts.scaling.reduces and parts.runtime.ranks > 1):
            if all(slot.parameter.grad is None for slot in slots):
                self._warn_once(
                    "step() comes without a backward pass, and there is nothing to precondition: call "
                    "preconditioner.step() after loss.backward()"
                )
            elif not parts.progress.has_curvature:  # later the hooks need not see every pass
                self._warn_once(
                    "no backward pass of its layers was seen yet, and step() leaves their gradients as they are: "
                    "differentiate without create_graph=True, and build the Preconditioner before a compiled function "
                    f"calls the model{BLIND}"
                )
        if parts.scaling.reduces or not self.written.untouched():
            return True
        # The decorator of `step` adds a stack frame.
        warnings.warn("natgrad: step() without a backward pass since the last one", NatgradWarning, stacklevel=4)
        return False

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._are_new() and not _changes_nothing(optimizer):
            self._used.note(self._parts.structure.slots)
            self._warn_once(
                "optimizer.step() uses gradients that were never preconditioned: call preconditioner.step() after each "
                "backward() and before each optimizer.step(); if these steps are the optimizer's on purpose, as in a "
                "warm-up, all is well"
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(f"natgrad: {message}", NatgradWarning, stacklevel=5)  # the caller of either `step`

    def _are_new(self) -> bool:
        """Return whether a backward pass has written gradients since the preconditioner's last step."""
        capture, step = self._parts.capture, self._parts.progress.step
        self._optimizer_steps = self._optimizer_steps + 1 if step == self._last_step else 1
        self._last_step = step
        if capture.idle or all(slot.parameter.grad is None for slot in self._parts.structure.slots):
            return False
        if capture.backwards and capture.fills:
            return True
        # In steps without statistics the hooks see the forward pass only. New tensors in ``.grad`` come from a
        # backward pass; changed ones may come from clipping, but not before the optimizer's next step.
        return self.written.replaced() or (self._optimizer_steps > 1 and not self.written.untouched())


def _changes_nothing(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all learning rates are 0, as in the step with which torch's checkpoints initialise a state."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return all(isinstance(rate, (int, float)) and rate == 0 for rate in rates)
