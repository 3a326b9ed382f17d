"""Decompose running averages and rows, the second part of updating curvature."""

from __future__ import annotations

from natgrad.capture.reductions import Count
from natgrad.preconditioner.parts import Parts
from natgrad.preconditioner.refresh import RowRefresh, observed, run_tasks, share_decisions
from natgrad.refresh.rule import SIDES


class Decompositions:
    """Runs the decompositions that are due, in the step or in the background."""

    def __init__(self, parts: Parts) -> None:
        """Work on some parts."""
        self._parts = parts

    @property
    def are_due(self) -> bool:
        """Whether any are due in this step."""
        return bool(self._parts.scheduler.due_parts(self._parts.progress))

    def collect(self, *, at_once: bool) -> None:
        """Exchange the results of decompositions in the background, if they are due or `at_once`."""
        parts = self._parts
        plan, keys = parts.structure.plan, parts.background.keys
        with parts.progress.phase("renew", parts.runtime):
            try:
                parts.background.collect(
                    plan,
                    parts.runtime,
                    parts.failure_counters,
                    parts.progress,
                    parts.structure.precision.wire,
                    at_once=at_once,
                )
            finally:
                if not parts.background.keys:
                    parts.scheduler.end_refresh(parts.groups, keys)

    def end(self) -> None:
        """End decompositions in progress, between two steps, so that the next passes use their results."""
        self.collect(at_once=True)
        capture = self._parts.capture
        if not self._parts.runtime.any(bool(capture.backwards)):
            capture.sums.note_basis_versions()

    def update(self, count: Count | None, damping: float) -> None:
        """Decompose what is due on its owners, and exchange the results. Under "background" only start.

        Args:
            count: The argument of `step`.
            damping: γ of the step.
        """
        parts, capture, scheduler = self._parts, self._parts.capture, self._parts.scheduler
        if parts.progress.last_factors is None and not parts.gathered:
            return
        begins = not parts.progress.has_curvature
        with parts.progress.phase("renew", parts.runtime):
            rows_updated = self._update_rows(count, damping)  # first, so that `observed` includes these layers
            captured = (capture.wanted or not parts.summed) and not parts.renews_in_background
            captured = captured and (capture.rows.wanted or not parts.gathered)
            captured = captured and len(capture.sums.sides) == len(SIDES)
            usable = parts.inspection.usable(parts.groups, observed(parts.groups), captured=captured)
            reads = scheduler.due_parts(parts.progress)
            keys, decided = usable, scheduler.selects_layers and bool(usable)
            if scheduler.selects_layers:
                keys = scheduler.select_layers(parts.groups, usable, damping, parts.progress.step)
                if parts.shares_work:
                    share_decisions(parts.groups, parts.runtime)
            work = parts.groups, parts.structure.plan, parts.runtime, keys, damping
            if parts.renews_in_background:
                if not parts.background.begin(*work, parts.progress) and decided:
                    parts.progress.record_inverses(reads)
                return
            updated = run_tasks(*work, parts.failure_counters, parts.structure.precision.wire, reads=reads)
            scheduler.end_refresh(parts.groups, keys)
            decided = decided or updated or rows_updated
            if parts.agreed(decided) if begins else decided or parts.shares_work:
                parts.progress.record_inverses(reads)

    def _update_rows(self, count: Count | None, damping: float) -> bool:
        """Select, gather and invert the rows of this step, and return whether any block was updated."""
        parts, capture = self._parts, self._parts.capture
        skips = capture.sums.skip_step
        if not (parts.gathered and capture.rows.wanted) or (skips is not None and bool(skips)):
            return False
        capture.finish()
        parts.epochs.read_learning_rates(parts.clip.optimizer)
        refresh = RowRefresh(
            plan=parts.structure.plan,
            runtime=parts.runtime,
            epochs=parts.epochs,
            failure_counters=parts.failure_counters,
            damping=damping,
            seed=parts.sampler.seed,
            step=parts.progress.step,
            wire=parts.structure.precision.wire,
        )
        updated = refresh.run(parts.gathered, capture.rows, *parts.gains(count))
        parts.structure.plan = refresh.plan
        return updated
