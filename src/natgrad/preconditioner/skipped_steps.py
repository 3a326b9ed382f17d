"""Publish the steps of this rank, and find a rank that skips one before its messages meet those of other calls."""

from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.distributed.positions import BEAT, Position, Positions
from natgrad.errors import LostRankError, NatgradWarning
from natgrad.layers import Handle, remove_all
from natgrad.preconditioner.counters import StepCounters
from natgrad.preconditioner.parts import Parts

# The first skipped steps are all compared between the ranks, then only the 8th, 16th, ...: training means to skip.
_COMPARED = 4

# The longest time in seconds to wait until all ranks have skipped a step.
_LONGEST = 30.0

_ADVICE = "after a pass whose gradients are discarded, call preconditioner.discard()"


class SkippedSteps:
    """Notices when a forward pass begins although no step has used the last backward pass; several ranks only.

    All ranks may skip a step. So the first ranks to skip wait in the forward pass until the others have done so too.
    If another rank is in this step or has completed it, all ranks raise a `natgrad.NatgradError`. They compare through
    the store of the process group, because a message would meet one of the step.

    A step is skipped if, after a forward and a backward pass, the parameters have changed or the gradients have been
    cleared.
    """

    def __init__(self, parts: Parts) -> None:
        """Work on some parts; without a process group do nothing."""
        self._parts = parts
        self._positions: Positions | None = parts.runtime.positions
        self._handles: list[Handle] = []
        self._parameter: weakref.ref[nn.Parameter] | None = None
        self._version, self._began, self._differentiated, self._skipped = 0, False, False, 0
        if self._positions is not None:
            ranks = torch.distributed.get_process_group_ranks(parts.runtime.group)
            self._key = self._positions.add_preconditioner(parts.structure.digest(), ranks)
            weakref.finalize(self, remove_all, self._handles).atexit = False

    # --- Events -------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Register hooks on the model as the user calls it, and on one of its parameters."""
        parts = self._parts
        self.detach()
        slots = parts.structure.slots
        if self._positions is None or not slots:
            return
        parameter = slots[-1].parameter
        self._parameter, self._version = weakref.ref(parameter), parameter._version
        model = getattr(parts.model, "_orig_mod", parts.model)  # of torch.compile
        self._handles.append(model.register_forward_pre_hook(BeginHook(self)))
        self._handles.append(model.register_forward_hook(EndHook(self), always_call=True))
        if not parameter.is_leaf or not parameter.requires_grad:
            return
        self._handles.append(parameter.register_post_accumulate_grad_hook(BackwardHook(self)))

    def detach(self) -> None:
        """Remove the hooks."""
        remove_all(self._handles)

    def forget(self) -> None:
        """Forget the last backward pass: a step has used it, or it has been discarded on purpose."""
        self._differentiated = False

    @contextmanager
    def step(self, progress: StepCounters) -> Iterator[None]:
        """Record that this rank is in a step, and announce an exception that ends it.

        Raises:
            NatgradError: if the ranks have found a skipped step.
        """
        found = self._positions
        if found is None:
            yield
            return
        step = progress.step
        self._began = self._differentiated = False
        if found.notice is not None and found.notice.final:
            raise LostRankError(f"step() {step}: {found.notice.text}")
        found.enter(f"in step() {step}")
        found.here.steps[self._key], found.here.stepping = step, self._key
        try:
            yield
            found.here.call = f"between its steps, after {progress.step} of them"
        except Exception as error:
            found.fail(error)
            raise
        finally:
            found.here.steps[self._key], found.here.stepping = progress.step, None

    def begin_forward(self) -> None:
        """Record that a forward pass begins, and compare the ranks if a step was skipped."""
        found, parameter = self._positions, None if self._parameter is None else self._parameter()
        if found is None or parameter is None or not torch.is_grad_enabled():
            return
        step = found.here.steps[self._key]
        found.enter(f"in a forward or backward pass, before its step() {step}")
        version = parameter._version
        if self._differentiated and (version != self._version or parameter.grad is None):
            self._differentiated, self._skipped = False, self._skipped + 1
            if self._skipped <= _COMPARED or self._skipped & (self._skipped - 1) == 0:
                self._compare(found, step)
        self._version, self._began = version, True

    def end_forward(self) -> None:
        """Announce the exception that ends a forward pass, if there is one, and explain one of a lost connection."""
        error = sys.exc_info()[1]
        if self._positions is not None and error is not None:
            self._positions.explain(error)
            self._positions.fail(error)

    def end_backward(self) -> None:
        """Record that a backward pass has written gradients, unless the model's forward has not been called."""
        self._differentiated = self._began

    # --- Comparison ---------------------------------------------------------------------------------------------

    def _compare(self, found: Positions, step: int) -> None:
        """Wait until all ranks have skipped this step.

        If others are in the step, raise. If others have completed it, they may wait for this rank in the backward pass:
        go on, so that all ranks raise in their next step. If another rank has ended, go on too: messages to it raise.

        Warns:
            NatgradWarning: if the others do not skip it in time. Then this rank has discarded the gradients of a pass
                that the others have not made.
        """
        runtime = self._parts.runtime
        members = torch.distributed.get_process_group_ranks(runtime.group)
        key = f"skipped/{self._key}/{self._skipped}"
        count, pause, began = found.count(key, 1), 1e-4, time.monotonic()
        looked = began
        found.here.call = f"at its next forward pass without step() {step}"
        while 0 < count < runtime.ranks:
            time.sleep(pause)
            pause = min(2 * pause, BEAT / 10)
            if found.notice is not None and found.notice.final:
                raise LostRankError(found.notice.text)
            if time.monotonic() - looked > BEAT:
                looked = time.monotonic()
                others = found.of([rank for rank in members if rank != found.rank])
                ahead = {rank: at for rank, at in others.items() if self._is_ahead(at, step)}
                if ahead:
                    self._announce(found, step, ahead)
                    return
                if any(at.ended for at in others.values()):
                    return
                if looked - began > _LONGEST:
                    found.count(key, -1)
                    self._skipped -= 1
                    warnings.warn(
                        f"natgrad: rank {found.rank} has waited {_LONGEST:.0f} s for the others to skip step() {step}, "
                        f"as it has done itself; {_ADVICE}",
                        NatgradWarning,
                        stacklevel=2,
                    )
                    return
            count = found.count(key)

    def _is_ahead(self, at: Position, step: int) -> bool:
        """Return whether a rank is in a step or has completed it."""
        steps = at.steps.get(self._key, 0)
        return steps > step or (steps == step and at.stepping == self._key)

    def _announce(self, found: Positions, step: int, ahead: dict[int, Position]) -> None:
        where = "; ".join(f"rank {rank} {at}" for rank, at in list(ahead.items())[:8])
        text = (
            f"rank {found.rank} has skipped step() {step}: it begins another forward pass, and its last backward pass "
            f"was not followed by step(); {where}; {_ADVICE}"
        )
        found.announce(text, final=True)
        found.await_readers()
        if any(at.stepping is not None for at in ahead.values()):
            raise LostRankError(text)


class _Hook:
    """A hook on a module or parameter. Copies do nothing."""

    def __init__(self, steps: SkippedSteps | None = None) -> None:
        """Report to `steps`, which is held weakly."""
        self._steps = None if steps is None else weakref.ref(steps)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a hook that does nothing."""
        return (type(self), ())

    @property
    def steps(self) -> SkippedSteps | None:
        """The receiver. None: there is none, or the code is being compiled."""
        return None if self._steps is None or torch.compiler.is_compiling() else self._steps()


class BeginHook(_Hook):
    """Reports the beginning of the model's forward."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Report it, as a forward pre-hook."""
        if self.steps is not None:
            self.steps.begin_forward()


class EndHook(_Hook):
    """Reports the end of the model's forward."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Report it, as a forward hook."""
        if self.steps is not None:
            self.steps.end_forward()


class BackwardHook(_Hook):
    """Reports that a parameter has received a gradient."""

    def __call__(self, parameter: Tensor) -> None:
        """Report it, as a hook after the accumulation."""
        if self.steps is not None:
            self.steps.end_backward()
