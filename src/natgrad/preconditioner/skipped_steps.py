"""Publish the steps of this rank, and find a rank that skips one before its messages meet those of other calls."""

from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.distributed.fsdp import is_sharded
from natgrad.distributed.positions import BEAT, Position, Positions
from natgrad.errors import LostRankError, NatgradWarning
from natgrad.layers import Handle, remove_all
from natgrad.linalg.device import on_host
from natgrad.preconditioner.collective_passes import CollectivePasses
from natgrad.preconditioner.counters import StepCounters
from natgrad.preconditioner.parts import Parts

# The first such steps are all compared between the ranks, then only the 8th, 16th, ...: they are meant to be so.
_COMPARED = 4

# The longest time in seconds to wait until all ranks have skipped a step, or begun another pass before it.
_LONGEST = 30.0

# The same until all ranks have called step() or begun a pass: the timeout of torch's messages.
_TIMEOUT = 1800.0

# The seconds without a publication after which the others no longer wait for a rank: it may have died.
_LOST = 5.0

_ADVICE = "after a pass whose gradients are discarded, call preconditioner.discard()"


class SkippedSteps:
    """Notices when this rank seems to skip a step or to make one more, and compares the ranks; several ranks only.

    All ranks may do so. So the first ranks wait until the others have done the same. If another rank has not, all ranks
    raise a `natgrad.NatgradError`. They compare through the store of the process group, because a message would meet
    one of another call.

    A step is skipped if, after a forward and a backward pass, the parameters have changed or the gradients have been
    cleared. It may also be skipped if another pass follows, but that pass may as well accumulate gradients. Then the
    ranks compare only if the pass sends messages of ``DistributedDataParallel`` or FSDP2, in which all ranks must take
    part, and only if there were never as many such passes before a step. A step without a backward pass is compared
    under these two only, for the same reason.
    """

    def __init__(self, parts: Parts) -> None:
        """Work on some parts; without a process group do nothing."""
        self._parts = parts
        self._positions: Positions | None = parts.runtime.positions
        self._handles: list[Handle] = []
        self._parameter: weakref.ref[nn.Parameter] | None = None
        self._passes = CollectivePasses(parts.model, reduces=parts.scaling.reduces)
        self._version, self._began, self._differentiated, self._skipped = 0, False, False, 0
        self._gradient_version = 0  # after the last backward pass
        self._accumulated = False  # whether the parameter has received a gradient since the last step
        self._without_pass = 0  # the number of steps without a backward pass
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
        # Before the hook of FSDP2, which sends messages.
        self._handles.append(parts.model.register_forward_pre_hook(_Report(self.begin_forward), prepend=True))
        self._handles.append(parts.model.register_forward_hook(_Report(self.end_forward), always_call=True))
        if not parameter.is_leaf or not parameter.requires_grad:
            return
        self._handles.append(parameter.register_post_accumulate_grad_hook(_Report(self.take_gradient)))

    def detach(self) -> None:
        """Remove the hooks."""
        remove_all(self._handles)
        self._passes.stop()

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
        self._passes.stop()
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
            if progress.step > step:
                self._accumulated = False
                self._count_from_zero(found)  # first: another rank must not read the passes of this step as later ones
            found.here.steps[self._key], found.here.stepping = progress.step, None

    def is_extra(self) -> bool:
        """Return whether other ranks are in a pass before the present step, for which this rank has made no pass.

        Then the others wait for this rank in that pass, and this rank must send no messages in `step`. A notice has all
        ranks raise in their next step.
        """
        found, passes = self._positions, self._passes
        seen = passes.number > 0 or self._accumulated or not self._parts.capture.idle
        if found is None or seen or not passes.is_supported:
            return False
        self._without_pass += 1
        if not _is_compared(self._without_pass):
            return False
        step, is_extra = found.here.steps[self._key], False
        key = f"extra/{self._key}/{step}"

        def look(others: Mapping[int, Position], waited: float, lost: bool) -> bool:
            nonlocal is_extra
            passed = {
                rank: at
                for rank, at in others.items()
                if at.steps.get(self._key) == step and at.passes.get(self._key, 0) > 0
            }
            is_extra = bool(passed)
            if is_extra:
                where = f"rank {found.rank} makes one step() more, its step() {step}"
                self._announce(found, f"{where}, without a backward pass since the last one; {_where(passed)}")
            elif lost or waited > _TIMEOUT or any(self._is_ahead(at, step) for at in others.values()):
                found.count(key, self._parts.runtime.ranks)  # have the others not wait
            else:
                return False
            return True

        self._wait(found, key, look)
        return is_extra

    def begin_forward(self, model: nn.Module) -> None:
        """Record that a forward pass of the model begins, and compare the ranks if a step was skipped."""
        found, parameter = self._positions, None if self._parameter is None else self._parameter()
        if found is None or parameter is None or not torch.is_grad_enabled():
            return
        step = found.here.steps[self._key] = self._parts.progress.step  # of a checkpoint, if one was loaded
        call = f"in a forward or backward pass, before its step() {step}"
        found.enter(call)
        version = parameter._version
        if self._differentiated and (version != self._version or self._is_cleared(parameter)):
            self._differentiated, self._skipped = False, self._skipped + 1
            self._count_from_zero(found)
            if _is_compared(self._skipped):
                self._compare(found, step)
                found.here.call = call
        self._version, self._began = version, True
        repeats = self._parts.hooks.forward is not self._parts.capture.forward  # in the second pass of a step
        if not repeats and self._passes.begin_forward(_Report(self.take_gradient)):
            self._count_pass(found, "forward")

    def end_forward(self, model: nn.Module) -> None:
        """Announce the exception that ends a forward pass, if there is one, and explain one of a lost connection."""
        error = sys.exc_info()[1]
        if self._positions is not None and error is not None:
            self._positions.explain(error)
            self._positions.fail(error)

    def take_gradient(self, parameter: Tensor) -> None:
        """Record that a parameter has received a gradient, before the wrapper averages it."""
        found = self._positions
        if found is not None and self._passes.begin_backward():
            self._count_pass(found, "backward")
        if self._parameter is not None and parameter is self._parameter():
            # Unless the model's forward has not been called.
            self._differentiated, self._accumulated = self._began, True
            self._gradient_version = 0 if parameter.grad is None else parameter.grad._version

    def _is_cleared(self, parameter: nn.Parameter) -> bool:
        """Return whether the gradient of the last backward pass has been set to None or, on a CPU, to 0."""
        gradient = parameter.grad
        if gradient is None:
            return True
        # Whether a sharded gradient is 0 is only known by a message.
        known = on_host(gradient) and not is_sharded(gradient)
        return known and gradient._version != self._gradient_version and not gradient.any()

    def _count_from_zero(self, found: Positions) -> None:
        self._passes.restart()
        found.here.passes[self._key] = 0

    # --- Comparison ---------------------------------------------------------------------------------------------

    def _count_pass(self, found: Positions, kind: str) -> None:
        """Count a pass in which all ranks take part. If it is one more than ever before a step, compare the ranks.

        If others are in the step, raise. If others have completed it, go on as `_compare` does.
        """
        is_more, number = self._passes.count(), self._passes.number
        found.here.passes[self._key] = number
        if not is_more:
            return
        step, key = found.here.steps[self._key], f"passes/{self._key}/{number}"

        def look(others: Mapping[int, Position], waited: float, lost: bool) -> bool:
            ahead = {
                rank: at
                for rank, at in others.items()
                if self._is_ahead(at, step) and at.passes.get(self._key, 0) < number
            }
            if ahead:
                self._report_skip(found, step, kind, ahead)
            elif lost or waited > _LONGEST:
                found.count(key, self._parts.runtime.ranks)  # have the others not wait
            else:
                return False
            return True

        self._wait(found, key, look)

    def _compare(self, found: Positions, step: int) -> None:
        """Wait until all ranks have skipped this step.

        If others are in the step, raise. If others have completed it, they may wait for this rank in the backward pass:
        go on, so that all ranks raise in their next step. If another rank is lost, go on too: messages to it raise.

        Warns:
            NatgradWarning: if the others do not skip it in time. Then this rank has discarded the gradients of a pass
                that the others have not made.
        """
        key = f"skipped/{self._key}/{self._skipped}"

        def look(others: Mapping[int, Position], waited: float, lost: bool) -> bool:
            ahead = {rank: at for rank, at in others.items() if self._is_ahead(at, step)}
            if ahead:
                self._report_skip(found, step, "forward", ahead)
            elif waited > _LONGEST:
                found.count(key, -1)
                self._skipped -= 1
                warnings.warn(
                    f"natgrad: rank {found.rank} has waited {_LONGEST:.0f} s for the others to skip step() {step}, "
                    f"as it has done itself; {_ADVICE}",
                    NatgradWarning,
                    stacklevel=2,
                )
            return bool(ahead) or lost or waited > _LONGEST

        found.here.call = f"at its next forward pass without step() {step}"
        self._wait(found, key, look)

    def _wait(self, found: Positions, key: str, look: Callable[[Mapping[int, Position], float, bool], bool]) -> None:
        """Wait until all ranks wait with this key, or until `look` returns True.

        Args:
            found: The positions.
            key: What the ranks have in common.
            look: Called twice a second with the positions of the others, the seconds since the beginning, and whether
                any of the others has ended or no longer publishes its position.

        Raises:
            NatgradError: if another rank has announced that training cannot go on.
        """
        ranks = self._parts.runtime.ranks
        members = torch.distributed.get_process_group_ranks(self._parts.runtime.group)
        count, pause, began = found.count(key, 1), 1e-4, time.monotonic()
        looked, beats = began, dict[int, tuple[int, float]]()
        while 0 < count < ranks:  # 0: the store is gone
            time.sleep(pause)
            pause = min(2 * pause, BEAT / 10)
            if found.notice is not None and found.notice.final:
                raise LostRankError(found.notice.text)
            others = None
            if time.monotonic() - looked > BEAT:
                looked = time.monotonic()
                others = found.of([rank for rank in members if rank != found.rank])
            count = found.count(key)  # after the positions: ranks that have gone on since were counted before
            if others is None or not 0 < count < ranks:
                continue
            for rank, at in others.items():
                if rank not in beats or beats[rank][0] != at.beat:
                    beats[rank] = at.beat, looked
            lost = any(at.ended or looked - beats[rank][1] > _LOST for rank, at in others.items())
            if look(others, looked - began, lost):
                return

    def _is_ahead(self, at: Position, step: int) -> bool:
        """Return whether a rank is in a step or has completed it."""
        steps = at.steps.get(self._key, 0)
        return steps > step or (steps == step and at.stepping == self._key)

    def _report_skip(self, found: Positions, step: int, kind: str, ahead: Mapping[int, Position]) -> None:
        """Announce that this rank has skipped a step that others are in or have completed. Raise if they are in it."""
        text = (
            f"rank {found.rank} has skipped step() {step}: it begins another {kind} pass, and its last backward pass "
            f"was not followed by step(); {_where(ahead)}; {_ADVICE}"
        )
        self._announce(found, text)
        if any(at.stepping is not None for at in ahead.values()):
            raise LostRankError(text)

    def _announce(self, found: Positions, text: str) -> None:
        found.announce(text, final=True)
        found.await_readers()


def _where(positions: Mapping[int, Position]) -> str:
    return "; ".join(f"rank {rank} {at}" for rank, at in list(positions.items())[:8])


def _is_compared(number: int) -> bool:
    return number <= _COMPARED or number & (number - 1) == 0


class _Report:
    """A hook that calls a method of `SkippedSteps`, held weakly. In compiled code, or copied, it does nothing."""

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        """Call a bound method. None: call nothing."""
        self._method = None if method is None else weakref.WeakMethod(method)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a hook that does nothing."""
        return (type(self), ())

    def __call__(self, reported: Any, *_: Any) -> None:
        """Pass on the module or parameter that the hook is on."""
        method = None if self._method is None or torch.compiler.is_compiling() else self._method()
        if method is not None:
            method(reported)
