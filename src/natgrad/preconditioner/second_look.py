"""After the optimizer's step: a second pass over the batch, and damping by the change of the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.capture.reductions import Count
from natgrad.damping.quadratic import Losses, QuadraticModel
from natgrad.preconditioner.parts import Parts
from natgrad.preconditioner.renewal import renew
from natgrad.preconditioner.second_pass import Closure, Replay


class SecondLook:
    """Evaluates the batch again after the optimizer's step, if a curvature or a damping rule needs it."""

    def __init__(self, parts: Parts) -> None:
        """Work on some parts."""
        self._parts = parts

    @property
    def asked_by(self) -> str:
        """What needs the batch again after this step. Empty: nothing."""
        parts, capture = self._parts, self._parts.capture
        if not capture.backwards:
            return ""
        if parts.damping.adaptation.tries(parts.progress.step):
            return parts.damping.name
        replayed = (group.curvature for group in parts.groups if group.replayed_statistics)
        first = next(replayed, None)
        return type(first).__name__ if capture.wanted and first is not None else ""

    def prepare(self, count: Count | None, closure: Closure | None, before: int | None) -> None:
        """Schedule a second pass after the optimizer's step, if a curvature needs it.

        Args:
            count: The argument of `step`.
            closure: The argument of `step`.
            before: The step at which statistics were updated before this one.
        """
        parts, progress, optimizer = self._parts, self._parts.progress, self._parts.clip.optimizer
        replayed = any(group.replayed_statistics for group in parts.groups)
        if optimizer is None or progress.last_factors != progress.step or not replayed:
            return
        shares = parts.gains(count)[0]
        replay = Replay.of(parts.groups, parts.capture, parts.runtime, closure, shares=shares, scaling=parts.scaling)
        last = progress.last_inverses
        damping = progress.damping if last is not None and (before is None or last > before) else None
        parts.second.await_step(optimizer, lambda: self._replay(replay, damping))

    @torch.no_grad()
    def _replay(self, replay: Replay, damping: float | None) -> None:
        """Run the second pass. With a `damping` also run the tasks that use it."""
        parts = self._parts
        groups = [group for group in parts.groups if group.replayed_statistics]
        views = [group.with_statistics(group.replayed_statistics) for group in groups]
        with parts.progress.phase("replay", parts.runtime):
            sums = replay.sums(parts.model, views, parts.capture, parts.hooks, parts.runtime)
        with parts.progress.phase("renew", parts.runtime):
            keys = replay.learn(groups, sums, views, parts.watch, parts.runtime)
            if damping is not None:
                plan, wire = parts.structure.plan, parts.precision.wire
                renew(groups, plan, parts.runtime, keys, (), damping, parts.watch, wire, replayed=True)

    def quadratic_model(self, damping: float, scale: float | Tensor) -> QuadraticModel | None:
        """Return the quadratic model of the loss at the present parameters, if a damping rule needs it in this step."""
        parts = self._parts
        if not parts.damping.adaptation.tries(parts.progress.step):
            return None
        return QuadraticModel(parts.groups, parts.runtime, damping, scale)

    def compare(self, model: QuadraticModel, closure: Closure | None, count: Count | None) -> None:
        """Schedule the comparison of the optimizer's step with its quadratic model."""
        parts, capture, optimizer = self._parts, self._parts.capture, self._parts.clip.optimizer
        assert optimizer is not None  # checked when the preconditioner was built
        model.take_others(parts.root)
        weight = parts.scaling.weight(capture.number(count))
        losses = Losses(closure if capture.backwards else None, capture.recorded(), weight)
        self._compute(losses)
        parts.second.await_step(optimizer, lambda: self._judge(model, losses))

    def _compute(self, losses: Losses) -> None:
        with self._parts.progress.phase("replay", self._parts.runtime):
            losses.compute(self._parts.model, self._parts.hooks)

    @torch.no_grad()
    def _judge(self, model: QuadraticModel, losses: Losses) -> None:
        """Update the damping rule with the actual and the predicted change of the loss."""
        self._compute(losses)
        parts = self._parts
        device = next(parameter.device for parameter in parts.root.parameters())
        with parts.progress.phase("replay", parts.runtime):
            parts.damping.adaptation.learn(model.outcome(losses, device))
