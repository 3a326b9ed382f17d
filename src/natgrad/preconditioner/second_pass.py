"""After the optimizer's step: a second pass over the batch, for K-BFGS.

A hook after the optimizer's step calls the closure. Each forward pass starts with the random numbers of the first one,
so that dropout is the same (not in compiled models, whose passes no hook sees). Random numbers, buffers, training modes
and ``.grad`` stay unchanged. The backward pass computes gradients of the layers' outputs only, not of parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.capture import Capture
from natgrad.capture.model_hooks import ForwardPass
from natgrad.capture.reductions import Count
from natgrad.capture.repetition import Repetition, preserve_state
from natgrad.capture.sums import Shares, StatisticsBuffer
from natgrad.distributed import Communicator
from natgrad.distributed.fsdp import extra_pass, rows_of
from natgrad.errors import NatgradError, NatgradWarning, describe, require
from natgrad.preconditioner.parts import Parts
from natgrad.preconditioner.refresh import run_tasks
from natgrad.state.block_group import BlockGroup
from natgrad.state.parameters import ParameterRows, slots_of
from natgrad.state.tensors import along

Closure = Callable[[], Any]


class Reevaluation:
    """A closure that follows torch's convention: it clears the gradients and runs the backward pass."""

    def __init__(self, closure: Closure) -> None:
        """Wrap a closure."""
        self._closure = closure

    def __call__(self) -> Any:
        """Call the closure."""
        return self._closure()


@dataclass
class _Batch:
    """A batch that curvatures compare before and after the optimizer's step.

    Attributes:
        closure: Returns the loss of the batch. None: this rank had no batch.
        recorded: The forward passes of the first pass.
        summaries: The summaries of the first pass, by the ``id`` of the groups that this rank is a worker of.
        shares: The argument of `StatisticsBuffer.close`.
        gain: The argument of `StatisticsBuffer.close`.
        scale: The scale of the loss.
        damping: γ of the tasks that follow the second pass. None: no tasks follow.
    """

    closure: Closure | None
    recorded: Sequence[ForwardPass]
    summaries: dict[int, Mapping[str, Tensor]]
    shares: Shares
    gain: float | Tensor
    scale: float | Tensor
    damping: float | None


class SecondPass:
    """Evaluates the batch again after the optimizer's step, if a curvature needs it."""

    def __init__(self, parts: Parts) -> None:
        """Start without a scheduled pass."""
        self._parts = parts
        self._handle: Any = None
        self._scheduled: Callable[[], None] | None = None
        self._warned = False

    def begin(self, closure: object) -> None:
        """Begin a step: check its closure, and cancel the pass scheduled by the last step.

        Raises:
            ValueError: if `closure` is not callable.
            NatgradError: if it is missing although it is needed.
        """
        require(closure is None or callable(closure), "closure", describe(closure), "a function without arguments")
        asks = self._asked_by()
        if asks and closure is None:
            raise NatgradError(
                f"{asks} needs preconditioner.step(closure): the closure returns the loss of the "
                "same batch once more, without a backward pass"
            )
        if self.cancel() and not self._parts.scaling.skips and not self._warned:
            self._warned = True
            warnings.warn(
                "natgrad: the optimizer that the Preconditioner was given has not stepped since the last step(), and "
                "the second pass over that batch was left out",
                NatgradWarning,
                stacklevel=4,  # the caller of `step`
            )

    def _asked_by(self) -> str:
        """Return what needs the batch again after this step. Empty: nothing."""
        parts, capture = self._parts, self._parts.capture
        if not capture.backwards:
            return ""
        replayed = next((group.curvature for group in parts.groups if group.replayed_statistics), None)
        return type(replayed).__name__ if capture.wanted and replayed is not None else ""

    def cancel(self) -> bool:
        """Cancel the scheduled pass, and return whether there was one."""
        if self._handle is not None:
            self._handle.remove()
        waited = self._scheduled is not None
        self._handle = self._scheduled = None
        return waited

    def _after_optimizer_step(self, act: Callable[[], None]) -> None:
        """Call `act` once, after the optimizer's next step."""
        self._scheduled = act

        def hook(*_: object) -> None:
            # The hook is not removed here, because the optimizer is iterating over its hooks.
            waiting, self._scheduled = self._scheduled, None
            if waiting is not None:
                with torch.no_grad():
                    waiting()

        optimizer = self._parts.clip.optimizer
        assert optimizer is not None  # checked when the preconditioner was built
        self._handle = optimizer.register_step_post_hook(hook)

    def schedule(self, closure: Closure | None, count: Count | None, statistics_before: int | None) -> None:
        """Schedule what is to follow the optimizer's step.

        `statistics_before` is the step at which statistics were updated before this one.
        """
        parts = self._parts
        if self._replayed and parts.progress.last_factors == parts.progress.step:
            batch = self._first_pass(closure, count, statistics_before)
            self._after_optimizer_step(lambda: self._replay(batch))

    # --- Curvatures that compare a batch before and after the step ------------------------------------------------

    @property
    def _replayed(self) -> list[BlockGroup]:
        return [group for group in self._parts.groups if group.replayed_statistics]

    def _first_pass(self, closure: Closure | None, count: Count | None, statistics_before: int | None) -> _Batch:
        """Collect the data before the optimizer's step. Collective if parameters are sharded."""
        parts, last = self._parts, self._parts.progress.last_inverses
        weights = _weights(self._replayed, parts.runtime)
        summaries = {
            id(group): group.curvature.replay_summary(
                group.corrected(slice(None), group.replayed_statistics), weights[id(group)]
            )
            for group in self._replayed
            if group.role.is_gradient_worker
        }
        refreshed = last is not None and (statistics_before is None or last > statistics_before)
        return _Batch(
            closure if parts.capture.backwards else None,
            parts.capture.recorded(),
            summaries,
            *parts.gains(count),
            scale=parts.scaling.of_loss,
            damping=parts.progress.damping if refreshed else None,
        )

    def _replay(self, batch: _Batch) -> None:
        """Run the second pass, update the state of the curvatures, and run the tasks that use it."""
        parts, groups = self._parts, self._replayed
        views = [group.with_statistics(group.replayed_statistics) for group in groups]
        with parts.progress.phase("replay", parts.runtime):
            sums = self._sums(batch, views)
        with parts.progress.phase("renew", parts.runtime):
            keys = self._learn(batch, sums, groups, views)
            if batch.damping is not None:
                plan, wire = parts.structure.plan, parts.structure.precision.wire
                run_tasks(groups, plan, parts.runtime, keys, batch.damping, parts.failure_counters, wire, replayed=True)

    def _sums(self, batch: _Batch, views: list[BlockGroup]) -> StatisticsBuffer:
        """Run the second pass, and return the sums over all ranks of groups with the replayed statistics.

        Raises:
            Exception: an error of the closure; on the other ranks a `NatgradError`. With a sharded model the others
                wait in its messages until this rank ends.
            ValueError: if the closure does not return a loss.
            NatgradError: if the closure ran a backward pass, or used another batch.
        """
        model, runtime = self._parts.model, self._parts.runtime
        sums = StatisticsBuffer(views, fused=runtime.ranks > 1, kind="replay")
        error = extra_pass(model, lambda: self._repeat(batch, views, sums))
        # Agree before sending: a rank that raised would leave the others waiting.
        failed = runtime.any(error is not None) if runtime.ranks > 1 else error is not None
        if error is not None:
            raise error
        if failed:
            raise NatgradError("the closure has raised an error on another rank, whose own output tells it")
        sums.close(batch.shares, batch.gain)
        sums.reduce(runtime, None)
        return sums

    def _repeat(self, batch: _Batch, views: list[BlockGroup], sums: StatisticsBuffer) -> None:
        """Run this rank's forward and backward passes again."""
        if batch.closure is None:
            return
        repetition = Repetition(batch.recorded)
        replay = self._parts.capture.replaying(views, sums, repetition)
        with preserve_state(self._parts.model), self._parts.hooks.reporting_to(replay.forward), torch.enable_grad():
            result = batch.closure()
            if not isinstance(batch.closure, Reevaluation):
                _differentiate(result, sums, replay, batch.scale)
        replay.finish()
        passes = [forward.batch for forward in repetition.passes if forward.first in replay.backwards]
        expected = [forward.batch for forward in batch.recorded]
        if expected and passes != expected:
            raise NatgradError(
                f"the closure has shown batches of {passes} samples, the step was of {expected}: return the loss "
                "of the same mini-batch, of all its parts where they were accumulated"
            )

    def _learn(
        self, batch: _Batch, sums: StatisticsBuffer, groups: Sequence[BlockGroup], views: Sequence[BlockGroup]
    ) -> set[str]:
        """Update the state of the curvatures, and return the keys of the layers whose values were all finite.

        Collective if parameters are sharded.
        """
        originals = dict(zip(map(id, views), groups, strict=True))
        weights = _weights(groups, self._parts.runtime)
        flags: list[tuple[BlockGroup, slice, Tensor]] = []
        for piece in sums.arrived():
            group, blocks = originals[id(piece.group)], piece.blocks
            if not group.role.is_gradient_worker or group.fresh is None:
                continue
            rows = piece.rows.clamp(min=1)
            means = {
                name: (total / along(rows, total.ndim - 1)).to(group.work_dtype) for name, total in piece.sums.items()
            }
            after = group.curvature.replay_summary(means, weights[id(group)][blocks])
            before = {name: summary[blocks] for name, summary in batch.summaries[id(group)].items()}
            finite = torch.stack([summary.flatten(1).sum(1).isfinite() for summary in after.values()]).all(0)
            seen = (piece.rows > 0) & group.fresh[blocks]
            if group.failures.bounded is not None:
                seen = seen & ~group.failures.bounded[blocks]
            memory = group.allocate_memory()
            known = {spec.name: memory.read(spec.name, blocks) for spec in group.memory_specs}
            group.write_memory(blocks, known, group.curvature.replay_update(known, before, after), seen & finite)
            self._parts.failure_counters.count_skipped_replays(group, blocks, seen & ~finite)
            flags.append((group, blocks, seen & finite))
        return _whole_layers(flags)


def _differentiate(result: Any, sums: StatisticsBuffer, capture: Capture, scale: float | Tensor) -> None:
    """Differentiate the loss that the closure returned."""
    if not sums.empty:
        raise NatgradError("the closure has run a backward pass: it is to return the loss, and no more")
    loss = result[0] if isinstance(result, tuple) and result else result
    fits = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
    require(fits, "closure()", describe(loss), "a scalar loss with a graph, or (loss, outputs)")
    capture.replayed_pass(loss, scale)


def _weights(groups: Sequence[BlockGroup], runtime: Communicator) -> dict[int, Tensor]:
    """Return the parameters of the groups that this rank is a worker of ``[N, o, i]``, by the group's ``id``."""
    rows, slots = ParameterRows(runtime), [slot for group in groups for slot in slots_of(group)]
    held = {id(slot): rows_of(slot.name, slot.parameter.detach(), rows.held(slot)) for slot in slots}
    return rows.gather_blocks([(group, group.role.assignment.workers) for group in groups], held, "replay")


def _whole_layers(flags: Sequence[tuple[BlockGroup, slice, Tensor]]) -> set[str]:
    """Return the keys of the layers whose blocks are all flagged. Waits once."""
    if not flags:
        return set()
    numbers = torch.cat([fine.to(flags[0][2].device) for _, _, fine in flags]).tolist()
    places = [(id(group), block) for group, blocks, _ in flags for block in range(blocks.start, blocks.stop)]
    good = {place for place, fine in zip(places, numbers, strict=True) if fine}
    return {
        member.layer.key
        for group in {id(group): group for group, _, _ in flags}.values()
        for member in group.members
        if all((id(group), block) in good for block in range(member.start, member.stop))
    }
