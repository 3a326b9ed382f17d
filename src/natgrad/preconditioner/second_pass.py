"""The second pass over a batch, after the optimizer's step: what a curvature learns from the change (K-BFGS).

The optimizer calls the closure in the hook after its step. Each forward pass begins with the random numbers that it had
the first time, so that dropout drops the same: the change is to be that of one function. (Where the model is compiled
nobody sees its passes begin, and chance goes on.) Random numbers, buffers, training modes and ``.grad`` are afterwards
as they were before. The pass goes down to the layers' outputs only; no gradient of a parameter is made.
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
from natgrad.capture.repetition import Chance, Repetition, as_found
from natgrad.capture.sums import StatisticsBuffer
from natgrad.capture.sums.messages import Shares
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
    """A closure by torch's convention: it clears the gradients and runs a backward pass of its own."""

    def __init__(self, closure: Closure) -> None:
        """Wrap it."""
        self._closure = closure

    def __call__(self) -> Any:
        """Call it."""
        return self._closure()


def check_second_pass(covered: Iterable[tuple[Layer, Curvature]], optimizer: object, damping: Control) -> None:
    """Check what a curvature asks for that needs a second pass.

    Raises:
        ValueError: without an optimizer, or with a damping of 1 or more.
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
    """Check the damping of a step, of curvatures with a second pass and a factor each.

    Raises:
        ValueError: if it is 1 or more where its root is a share (the double damping of K-BFGS).
    """
    for curvature, factor in curvatures:
        require(damping * factor < 1, "damping", damping * factor, f"a number below 1 with {curvature!r}")


class SecondPass:
    """Runs a closure in the hook that an optimizer calls after its step."""

    def __init__(self) -> None:
        """Wait for nothing."""
        self._handle: Any = None
        self._act: Callable[[], None] | None = None
        self._told = False

    def begin(self, asks: str, closure: object, *, skips: bool) -> None:
        """Begin a step: check its closure, and wait no more for the optimizer's last one.

        Args:
            asks: Who needs one now; empty: nobody.
            closure: What `natgrad.Preconditioner.step` was given.
            skips: Whether the optimizer's step may rightly be left out (``GradScaler``).

        Raises:
            ValueError: if `closure` cannot be called.
            NatgradError: if there is none though one is needed now.
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
                stacklevel=4,  # past the decorator of `step`
            )

    def cancel(self) -> bool:
        """Wait no more; tell whether a second pass was to come."""
        if self._handle is not None:
            self._handle.remove()
        waited = self._act is not None
        self._handle = self._act = None
        return waited

    def await_step(self, optimizer: torch.optim.Optimizer, act: Callable[[], None]) -> None:
        """Have `act` called once, after the optimizer's next step."""
        self._act = act

        def hook(*_: object) -> None:
            # It is not removed here: the optimizer is going through its hooks.
            waiting, self._act = self._act, None
            if waiting is not None:
                waiting()

        self._handle = optimizer.register_step_post_hook(hook)


@dataclass
class Replay:
    """What the second pass over a batch goes by, told before the optimizer's step.

    Attributes:
        closure: Returns the loss of the batch; None: this rank had none.
        recorded: The forward passes of the first pass.
        shown: By the ``id`` of a stack that this rank works for, what the first pass has shown of it.
        shares: See `StatisticsBuffer.close`.
        gain: Likewise.
        scale: What the loss is scaled by.
    """

    closure: Closure | None
    recorded: Sequence[tuple[Pass, Chance]]
    shown: dict[int, Mapping[str, Tensor]]
    shares: Shares
    gain: float | Tensor
    scale: float | Tensor

    @classmethod
    def of(
        cls,
        stacks: Iterable[BlockGroup],
        capture: Capture,
        runtime: Communicator,
        closure: Closure | None,
        *,
        shares: Shares,
        scaling: Scaling,
    ) -> Replay:
        """Take what the pass before the optimizer's step has shown; collective where parameters are sharded."""
        own = [stack for stack in stacks if stack.replayed_statistics]
        P = _weights(own, runtime)
        shown = {
            id(stack): stack.curvature.replay_summary(
                stack.corrected(slice(None), stack.replayed_statistics), P[id(stack)]
            )
            for stack in own
            if stack.role.is_gradient_worker
        }
        passes = len(capture.backwards)
        gain = scaling.of_captured(passes)
        return cls(closure if passes else None, capture.recorded(), shown, shares, gain, scaling.of_loss)

    def sums(
        self, model: nn.Module, views: list[BlockGroup], capture: Capture, hooks: Hooks, runtime: Communicator
    ) -> StatisticsBuffer:
        """Look at the batch again; return the sums over all ranks.

        Args:
            model: The model, in its wrapper.
            views: Stacks with what is to be seen as their statistics.
            capture: What has seen the first pass.
            hooks: Those on the model.
            runtime: The ranks.

        Raises:
            Exception: what the closure raises; on the other ranks a `NatgradError`. Of a sharded model these wait in
                its own messages until this rank ends.
            ValueError: if it returns no loss.
            NatgradError: if it ran a backward pass, or its loss is of another batch.
        """
        sums, error = StatisticsBuffer(views, fused=runtime.ranks > 1, kind="replay"), None
        with resharded(model) as sharded:
            try:
                self._repeat(model, views, sums, capture, hooks)
            except Exception as raised:
                if sharded:
                    raise
                error = raised
        # The ranks meet before they send: whoever has raised would leave the others waiting.
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
        """Look at this rank's batch again."""
        if self.closure is None:
            return
        repetition = Repetition(self.recorded)
        replay = capture.replaying(views, sums, repetition)
        with as_found(model), hooks.reporting_to(replay.forward), torch.enable_grad():
            self._differentiate(self.closure(), sums, replay)
        replay.finish()
        passes = [forward.batch for forward in repetition.passes if forward.first in replay.backwards]
        expected = [forward.batch for forward, _ in self.recorded]
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
        stacks: Sequence[BlockGroup],
        sums: StatisticsBuffer,
        views: Sequence[BlockGroup],
        watch: FailureCounters,
        runtime: Communicator,
    ) -> set[str]:
        """Renew what the curvatures of `stacks` remember; return the keys of the layers of which all was finite.

        Collective where parameters are sharded.
        """
        origins = dict(zip(map(id, views), stacks, strict=True))
        P = _weights(stacks, runtime)
        flags: list[tuple[BlockGroup, slice, Tensor]] = []
        for piece in sums.arrived():
            stack, blocks = origins[id(piece.stack)], piece.blocks
            if not stack.role.is_gradient_worker or stack.fresh is None:
                continue
            rows = piece.rows.clamp(min=1)
            means = {name: (own / along(rows, own.ndim - 1)).to(stack.work_dtype) for name, own in piece.sums.items()}
            after = stack.curvature.replay_summary(means, P[id(stack)][blocks])
            before = {name: own[blocks] for name, own in self.shown[id(stack)].items()}
            finite = torch.stack([own.flatten(1).sum(1).isfinite() for own in after.values()]).all(0)
            seen = (piece.rows > 0) & stack.fresh[blocks]
            memory = stack.allocate_memory()
            known = {spec.name: memory.read(spec.name, blocks) for spec in stack.memories}
            stack.rewrite(blocks, known, stack.curvature.replay_update(known, before, after), seen & finite)
            watch.saw_replays(stack, blocks, seen & ~finite)
            flags.append((stack, blocks, seen & finite))
        return _whole_layers(flags)


def _weights(stacks: Sequence[BlockGroup], runtime: Communicator) -> dict[int, Tensor]:
    """Return the parameters of the stacks that this rank works for as blocks ``[N, o, i]``, by the stack's ``id``."""
    rows, slots = Rows(runtime), [slot for stack in stacks for slot in slots_of(stack)]
    own = {id(slot): rows_of(slot.name, slot.parameter.detach(), rows.held(slot)) for slot in slots}
    return rows.whole([(stack, stack.role.seat.workers) for stack in stacks], own, "replay")


def _whole_layers(flags: Sequence[tuple[BlockGroup, slice, Tensor]]) -> set[str]:
    """Return the keys of the layers whose blocks all have a flag; waits once for each device."""
    good: set[tuple[int, int]] = set()  # stacks and blocks
    for device in dict.fromkeys(flag.device for _, _, flag in flags):
        own = [entry for entry in flags if entry[2].device == device]
        places = [(id(stack), block) for stack, blocks, _ in own for block in range(blocks.start, blocks.stop)]
        told = torch.cat([flag for _, _, flag in own]).tolist()
        good |= {place for place, fine in zip(places, told, strict=True) if fine}
    return {
        member.layer.key
        for stack in {id(stack): stack for stack, _, _ in flags}.values()
        for member in stack.members
        if all((id(stack), block) in good for block in range(member.start, member.stop))
    }
