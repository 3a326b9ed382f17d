"""What happens after the optimizer's step: a second pass over the batch, and damping by what the step has gained."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.capture.reductions import Count
from natgrad.damping.losses import Losses
from natgrad.damping.quadratic import Model
from natgrad.preconditioner.parts import Parts
from natgrad.preconditioner.renewal import renew
from natgrad.preconditioner.second_pass import Closure, Replay


class SecondLook:
    """Has the batch looked at again after the optimizer's step, where a curvature or a rule of damping needs it."""

    def __init__(self, parts: Parts) -> None:
        """Work on some parts."""
        self._parts = parts

    @property
    def asked_by(self) -> str:
        """Who needs the batch once more after this step; empty: nobody."""
        parts, capture = self._parts, self._parts.capture
        if not capture.backwards:
            return ""
        if parts.damping.tries(parts.progress.step):
            return parts.damping.name
        replayed = (stack.curvature for stack in parts.stacks if stack.replayed_statistics)
        first = next(replayed, None)
        return type(first).__name__ if capture.wanted and first is not None else ""

    def prepare(self, count: Count | None, closure: Closure | None, before: int | None) -> None:
        """Have the batch looked at again after the optimizer's step, if a curvature needs it.

        Args:
            count: That of the step.
            closure: Likewise.
            before: The step at which statistics were updated before this one.
        """
        parts, progress, optimizer = self._parts, self._parts.progress, self._parts.clip.optimizer
        replayed = any(stack.replayed_statistics for stack in parts.stacks)
        if optimizer is None or progress.last_factors != progress.step or not replayed:
            return
        shares = parts.gains(count)[0]
        replay = Replay.of(parts.stacks, parts.capture, parts.runtime, closure, shares=shares, scaling=parts.scaling)
        last = progress.last_inverses
        damping = progress.damping if last is not None and (before is None or last > before) else None
        parts.second.await_step(optimizer, lambda: self._replay(replay, damping))

    @torch.no_grad()
    def _replay(self, replay: Replay, damping: float | None) -> None:
        """Run the second pass, and with a `damping` renew what goes on with what it shows."""
        parts = self._parts
        stacks = [stack for stack in parts.stacks if stack.replayed_statistics]
        views = [stack.showing(stack.replayed_statistics) for stack in stacks]
        with parts.progress.phase("replay", parts.runtime):
            sums = replay.sums(parts.model, views, parts.capture, parts.hooks, parts.runtime)
        with parts.progress.phase("renew", parts.runtime):
            keys = replay.learn(stacks, sums, views, parts.watch, parts.runtime)
            if damping is not None:
                plan, wire = parts.structure.plan, parts.precision.wire
                renew(stacks, plan, parts.runtime, keys, (), damping, parts.watch, wire, replayed=True)

    def quadratic_model(self, damping: float, scale: float | Tensor) -> Model | None:
        """Return the model of the loss around the parameters as they are, if a rule compares this step with it."""
        parts = self._parts
        if not parts.damping.tries(parts.progress.step):
            return None
        return Model.of(parts.stacks, parts.runtime, damping, scale)

    def compare(self, model: Model, closure: Closure | None, count: Count | None) -> None:
        """Have the optimizer's coming step compared with its quadratic model."""
        parts, capture, optimizer = self._parts, self._parts.capture, self._parts.clip.optimizer
        assert optimizer is not None  # checked when the preconditioner was built
        model.take_others(parts.root, parts.stacks, parts.runtime)
        weight = parts.scaling.weight(capture.number(count))
        losses = Losses(closure if capture.backwards else None, capture.recorded(), weight)
        self._compute(losses)
        parts.second.await_step(optimizer, lambda: self._judge(model, losses))

    def _compute(self, losses: Losses) -> None:
        with self._parts.progress.phase("replay", self._parts.runtime):
            losses.compute(self._parts.model, self._parts.hooks)

    @torch.no_grad()
    def _judge(self, model: Model, losses: Losses) -> None:
        """Have the rule of damping learn how much of what the model promised the step has gained."""
        self._compute(losses)
        parts = self._parts
        device = next(parameter.device for parameter in parts.root.parameters())
        with parts.progress.phase("replay", parts.runtime):
            parts.damping.learn(model.outcome(losses, parts.runtime, device))
