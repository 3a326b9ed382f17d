"""The second pass over a batch after the optimizer's step, for K-BFGS.

A hook after the optimizer's step calls the closure. Each forward pass starts with the random numbers of the first one,
so that dropout is the same (not in compiled models, whose passes no hook sees). Random numbers, buffers, training modes
and ``.grad`` stay unchanged. The backward pass computes gradients of the layers' outputs only, not of parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.capture import Capture
from natgrad.capture.model_hooks import Hooks, Pass
from natgrad.capture.repetition import Repetition, as_found
from natgrad.capture.sums import Shares, StatisticsBuffer
from natgrad.curvature import Curvature
from natgrad.curvature.base import replayed_statistics, statistics_of
from natgrad.damping import Control
from natgrad.distributed import Communicator
from natgrad.distributed.fsdp import resharded, rows_of
from natgrad.errors import NatgradError, NatgradWarning, describe, require
from natgrad.layers import Layer
from natgrad.preconditioner.gradients.reduction import Scaling
from natgrad.preconditioner.guard.guard import FailureCounters
from natgrad.state.block_group import BlockGroup
from natgrad.state.sharded import Rows, slots_of
from natgrad.state.tensors import along

Closure = Callable[[], Any]


class Reevaluation:
    """A closure that follows torch's convention: it clears the gradients and runs the backward pass."""

    def __init__(self, closure: Closure) -> None:
        """Wrap it."""
        self._closure = closure

    def __call__(self) -> Any:
        """Call it."""
        return self._closure()


def check_second_pass(covered: Iterable[tuple[Layer, Curvature]], optimizer: object, damping: Control) -> None:
    """Check the arguments for curvatures that need a second pass.

    Raises:
        ValueError: without an optimizer, or if the damping is 1 or more.
    """
    damping.check(optimizer)
    replayed = [(own, layer) for layer, own in covered if replayed_statistics(statistics_of(own, layer))]
    if not replayed:
        return
    allowed = f"given: {replayed[0][0]!r} looks at the batch again after its step"
    require(optimizer is not None, "optimizer", optimizer, allowed)
    if damping.constant is not None:
        check_damping([(own, damping.factor(layer)) for own, layer in replayed], damping.constant)


def check_damping(curvatures: Iterable[tuple[Curvature, float]], damping: float) -> None:
    """Check the damping of a step for curvatures with a second pass, each with a factor.

    Raises:
        ValueError: if it is 1 or more: the double damping of K-BFGS uses its root as a fraction.
    """
    for curvature, factor in curvatures:
        require(damping * factor < 1, "damping", damping * factor, f"a number below 1 with {curvature!r}")


class SecondPass:
    """Runs a closure in the hook that an optimizer calls after its step."""

    def __init__(self) -> None:
        """Start without a scheduled pass."""
        self._handle: Any = None
        self._act: Callable[[], None] | None = None
        self._told = False

    def begin(self, asks: str, closure: object, *, skips: bool) -> None:
        """Begin a step: check its closure, and cancel the pass scheduled by the last step.

        Args:
            asks: What needs a second pass now. Empty: nothing.
            closure: The argument of `natgrad.Preconditioner.step`.
            skips: Whether a ``GradScaler`` may skip the optimizer's step.

        Raises:
            ValueError: if `closure` is not callable.
            NatgradError: if it is missing although it is needed.
        """
        require(closure is None or callable(closure), "closure", describe(closure), "a function without arguments")
        if asks and closure is None:
            raise NatgradError(
                f"{asks} needs preconditioner.step(closure): the closure returns the loss of the "
                "same batch once more, without a backward pass"
            )
        if self.cancel() and not skips and not self._told:
            self._told = True
            warnings.warn(
                "natgrad: the optimizer that the Preconditioner was given has not stepped since the last step(), and "
                "the second pass over that batch was left out",
                NatgradWarning,
                stacklevel=4,  # the caller of `step`
            )

    def cancel(self) -> bool:
        """Cancel the scheduled pass, and return whether there was one."""
        if self._handle is not None:
            self._handle.remove()
        waited = self._act is not None
        self._handle = self._act = None
        return waited

    def await_step(self, optimizer: torch.optim.Optimizer, act: Callable[[], None]) -> None:
        """Call `act` once, after the optimizer's next step."""
        self._act = act

        def hook(*_: object) -> None:
            # The hook is not removed here, because the optimizer is iterating over its hooks.
            waiting, self._act = self._act, None
            if waiting is not None:
                waiting()

        self._handle = optimizer.register_step_post_hook(hook)


@dataclass
class Replay:
    """The data for the second pass over a batch, collected before the optimizer's step.

    Attributes:
        closure: Returns the loss of the batch. None: this rank had no batch.
        recorded: The forward passes of the first pass.
        shown: The summaries of the first pass, by the ``id`` of the groups that this rank is a worker of.
        shares: The argument of `StatisticsBuffer.close`.
        gain: The argument of `StatisticsBuffer.close`.
        scale: The scale of the loss.
    """

    closure: Closure | None
    recorded: Sequence[Pass]
    shown: dict[int, Mapping[str, Tensor]]
    shares: Shares
    gain: float | Tensor
    scale: float | Tensor

    @classmethod
    def of(
        cls,
        groups: Iterable[BlockGroup],
        capture: Capture,
        runtime: Communicator,
        closure: Closure | None,
        *,
        shares: Shares,
        scaling: Scaling,
    ) -> Replay:
        """Collect the data before the optimizer's step. Collective if parameters are sharded."""
        own = [group for group in groups if group.replayed_statistics]
        P = _weights(own, runtime)
        shown = {
            id(group): group.curvature.replay_summary(
                group.corrected(slice(None), group.replayed_statistics), P[id(group)]
            )
            for group in own
            if group.role.is_gradient_worker
        }
        passes = len(capture.backwards)
        gain = scaling.of_captured(passes)
        return cls(closure if passes else None, capture.recorded(), shown, shares, gain, scaling.of_loss)

    def sums(
        self, model: nn.Module, views: list[BlockGroup], capture: Capture, hooks: Hooks, runtime: Communicator
    ) -> StatisticsBuffer:
        """Run the second pass, and return the sums over all ranks.

        Args:
            model: The model, in its wrapper.
            views: Groups with the replayed statistics.
            capture: The capture of the first pass.
            hooks: The hooks on the model.
            runtime: The ranks.

        Raises:
            Exception: an error of the closure; on the other ranks a `NatgradError`. With a sharded model the others
                wait in its messages until this rank ends.
            ValueError: if the closure does not return a loss.
            NatgradError: if the closure ran a backward pass, or used another batch.
        """
        sums, error = StatisticsBuffer(views, fused=runtime.ranks > 1, kind="replay"), None
        with resharded(model) as sharded:
            try:
                self._repeat(model, views, sums, capture, hooks)
            except Exception as raised:
                if sharded:
                    raise
                error = raised
        # Agree before sending: a rank that raised would leave the others waiting.
        failed = runtime.any(error is not None) if runtime.ranks > 1 else error is not None
        if error is not None:
            raise error
        if failed:
            raise NatgradError("the closure has raised an error on another rank, whose own output tells it")
        sums.close(self.shares, self.gain)
        sums.travel(runtime, None)
        return sums

    def _repeat(
        self, model: nn.Module, views: list[BlockGroup], sums: StatisticsBuffer, capture: Capture, hooks: Hooks
    ) -> None:
        """Run this rank's forward and backward passes again."""
        if self.closure is None:
            return
        repetition = Repetition(self.recorded)
        replay = capture.replaying(views, sums, repetition)
        with as_found(model), hooks.reporting_to(replay.forward), torch.enable_grad():
            self._differentiate(self.closure(), sums, replay)
        replay.finish()
        passes = [forward.batch for forward in repetition.passes if forward.first in replay.backwards]
        expected = [forward.batch for forward in self.recorded]
        if expected and passes != expected:
            raise NatgradError(
                f"the closure has shown batches of {passes} samples, the step was of {expected}: return the loss "
                "of the same mini-batch, of all its parts where they were accumulated"
            )

    def _differentiate(self, result: Any, sums: StatisticsBuffer, capture: Capture) -> None:
        if isinstance(self.closure, Reevaluation):
            return
        if not sums.empty:
            raise NatgradError("the closure has run a backward pass: it is to return the loss, and no more")
        loss = result[0] if isinstance(result, tuple) and result else result
        fits = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
        require(fits, "closure()", describe(loss), "a scalar loss with a graph, or (loss, outputs)")
        capture.replayed_pass(loss, self.scale)

    def learn(
        self,
        groups: Sequence[BlockGroup],
        sums: StatisticsBuffer,
        views: Sequence[BlockGroup],
        watch: FailureCounters,
        runtime: Communicator,
    ) -> set[str]:
        """Update the state of the curvatures, and return the keys of the layers whose values were all finite.

        Collective if parameters are sharded.
        """
        origins = dict(zip(map(id, views), groups, strict=True))
        P = _weights(groups, runtime)
        flags: list[tuple[BlockGroup, slice, Tensor]] = []
        for piece in sums.arrived():
            group, blocks = origins[id(piece.group)], piece.blocks
            if not group.role.is_gradient_worker or group.fresh is None:
                continue
            rows = piece.rows.clamp(min=1)
            means = {name: (own / along(rows, own.ndim - 1)).to(group.work_dtype) for name, own in piece.sums.items()}
            after = group.curvature.replay_summary(means, P[id(group)][blocks])
            before = {name: own[blocks] for name, own in self.shown[id(group)].items()}
            finite = torch.stack([own.flatten(1).sum(1).isfinite() for own in after.values()]).all(0)
            seen = (piece.rows > 0) & group.fresh[blocks]
            memory = group.allocate_memory()
            known = {spec.name: memory.read(spec.name, blocks) for spec in group.memory_specs}
            group.write_memory(blocks, known, group.curvature.replay_update(known, before, after), seen & finite)
            watch.saw_replays(group, blocks, seen & ~finite)
            flags.append((group, blocks, seen & finite))
        return _whole_layers(flags)


def _weights(groups: Sequence[BlockGroup], runtime: Communicator) -> dict[int, Tensor]:
    """Return the parameters of the groups that this rank is a worker of ``[N, o, i]``, by the group's ``id``."""
    rows, slots = Rows(runtime), [slot for group in groups for slot in slots_of(group)]
    own = {id(slot): rows_of(slot.name, slot.parameter.detach(), rows.held(slot)) for slot in slots}
    return rows.whole([(group, group.role.seat.workers) for group in groups], own, "replay")


def _whole_layers(flags: Sequence[tuple[BlockGroup, slice, Tensor]]) -> set[str]:
    """Return the keys of the layers whose blocks are all flagged. Waits once for each device."""
    good: set[tuple[int, int]] = set()  # groups and blocks
    for device in dict.fromkeys(flag.device for _, _, flag in flags):
        own = [entry for entry in flags if entry[2].device == device]
        places = [(id(group), block) for group, blocks, _ in own for block in range(blocks.start, blocks.stop)]
        told = torch.cat([flag for _, _, flag in own]).tolist()
        good |= {place for place, fine in zip(places, told, strict=True) if fine}
    return {
        member.layer.key
        for group in {id(group): group for group, _, _ in flags}.values()
        for member in group.members
        if all((id(group), block) in good for block in range(member.start, member.stop))
    }
