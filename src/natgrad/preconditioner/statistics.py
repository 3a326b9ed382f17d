"""The first part of updating curvature: sum statistics over the ranks, and update the running averages."""

from __future__ import annotations

from natgrad.capture.pipelined import BucketedStatistics
from natgrad.capture.reductions import Count
from natgrad.capture.rows import RowBuffer
from natgrad.capture.sums import StatisticsBuffer, of_sides
from natgrad.curvature.likelihood import Likelihood
from natgrad.preconditioner.parts import Parts
from natgrad.preconditioner.refresh import update_averages


class Statistics:
    """Captures statistics, sums them over the ranks, and updates the running averages."""

    def __init__(self, parts: Parts) -> None:
        """Work on some parts."""
        self._parts = parts

    def attach(self) -> None:
        """Begin to capture statistics of the current layers."""
        parts = self._parts
        rows = RowBuffer(parts.gathered, parts.structure.precision.wire if parts.runtime.ranks > 1 else None)
        parts.capture.attach(parts.groups, self._buffer(), rows)

    def _buffer(self) -> StatisticsBuffer:
        """Return an empty buffer for the statistics of all layers, with the buckets of the placement."""
        parts, placement = self._parts, self._parts.structure.plan.placement
        groups, shared = parts.summed, parts.runtime.ranks > 1
        if not (placement.rule.sends_during_backward and shared):
            return StatisticsBuffer(groups, fused=shared)
        return BucketedStatistics(
            groups,
            names=[layer.name for layer, _ in parts.structure.coverage.layers],
            bucket=placement.bucket,
            runtime=parts.runtime,
            wire=parts.structure.precision.wire,
        )

    def choose_next(self) -> None:
        """Choose what the hooks capture in the next step."""
        parts, scheduler, capture = self._parts, self._parts.scheduler, self._parts.capture
        sides = scheduler.due_statistics(parts.progress)
        capture.reset(
            wanted=any(of_sides(group, sides) for group in parts.summed),
            rows=bool(parts.gathered) and "gradients" in scheduler.due_parts(parts.progress),
            sides=sides,
        )

    def compare_gradients(self) -> None:
        """Compare ``.grad`` with what the hooks have seen, in the first steps."""
        parts = self._parts
        with parts.progress.phase("reduce", parts.runtime):
            parts.capture.audit.compare(parts.scaling.of_loss, parts.runtime)

    @property
    def likelihood(self) -> Likelihood | None:
        """The likelihood from which the next step samples labels. None: it needs no labels."""
        parts, capture = self._parts, self._parts.capture
        sums = capture.wanted and "gradients" in capture.sums.sides
        wanted = (one.curvature for one in parts.groups if (capture.rows.wanted if one.gathered else sums))
        return next((curvature.likelihood for curvature in wanted if curvature.likelihood is not None), None)

    def update(self, count: Count | None) -> None:
        """Sum the statistics over the ranks, and update the running averages; under "background" one step later."""
        parts, capture = self._parts, self._parts.capture
        capture.finish()
        sums = capture.sums
        if parts.runtime.ranks == 1 and sums.empty:
            return
        wire, sides = parts.structure.precision.wire, sums.sides
        with parts.progress.phase("reduce", parts.runtime):
            sums.close(*parts.gains(count))
            if parts.renews_in_background:
                parts.background.post(parts.groups, sums, parts.runtime, parts.progress, parts.inspection, wire)
                return
            sums.reduce(parts.runtime, wire)
            if "gradients" in sides:
                parts.inspection.look(parts.groups, sums, parts.runtime)
        with parts.progress.phase("renew", parts.runtime):
            updated = update_averages(sums, parts.failure_counters)
            counts = bool(updated) or parts.shares_work
            if parts.progress.last_factors is None:
                # The host waits for the result only before the first update: a checkpoint loader may step before any
                # forward pass, and the first batch may not be finite.
                counts = parts.agreed(any(bool(blocks.any()) for blocks in updated))
            if counts:
                parts.progress.record_factors(sides)
