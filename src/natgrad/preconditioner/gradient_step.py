"""Average, precondition, clip and write back the gradients of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

import torch
from torch import Tensor

from natgrad.capture.reductions import Count
from natgrad.distributed.fsdp import collect_rows, held_rows
from natgrad.layers import Slot
from natgrad.preconditioner.epochs import add_gradients
from natgrad.preconditioner.gradients.sharing import share
from natgrad.preconditioner.gradients.stacked import GroupGradients
from natgrad.preconditioner.guard.guard import check_preconditioned
from natgrad.preconditioner.parts import Parts

# Bytes of sharded gradients that are gathered at once: enough to hide the latency of a message.
_BUCKET = 2**26


class GradientStep:
    """Replaces ``.grad`` by the natural gradient."""

    def __init__(self, parts: Parts) -> None:
        """Work on some parts."""
        self._parts = parts

    def reduce(self, count: Count | None) -> float | Tensor:
        """Average ``.grad`` over the ranks with ``gradients="reduce"``.

        Returns:
            The factor that makes it the gradient of the mean loss.
        """
        parts, capture = self._parts, self._parts.capture
        samples, backwards = capture.number(count), len(capture.backwards)
        with parts.progress.phase("reduce", parts.runtime):
            device = next((parameter.device for parameter in parts.structure.root.parameters()), None)
            if device is not None and (parts.scaling.reduces or capture.wanted or capture.rows.wanted):
                capture.sums.skip_step = parts.scaling.skip_step(parts.runtime, device)
            return parts.scaling.of_gradients(parts.structure, parts.runtime, samples, backwards, parts.progress.step)

    def precondition(self, damping: float, scale: float | Tensor) -> None:
        """Precondition the gradients on their workers, share the results, clip them and write them back.

        Sharded gradients are collected for some groups at a time. Peak memory: the preconditioned gradients of all
        groups, the collected ones of `_BUCKET` bytes or of the largest group, and the raw ones of one group. `scale` is
        the factor that `reduce` returned.
        """
        parts, progress = self._parts, self._parts.progress
        with progress.phase("solve", parts.runtime):
            everything = self._collect()
            for bucket in _buckets(everything):
                received = self._receive_rows(bucket)
                for entry in bucket:
                    if entry.group.role.is_gradient_worker:
                        entry.gather(received)
                        started = perf_counter()
                        add_gradients(entry.group, entry.W, entry.blocks)
                        entry.V = entry.group.solve(entry.members, entry.W, damping)
                        entry.group.charge(entry.members, perf_counter() - started)
                        check_preconditioned(entry)
                del received  # before the next ones are collected
            if parts.shares_work:
                share(everything, parts.structure.plan, parts.runtime, parts.failure_counters)
            self._clear_unusable(everything)
            parts.clip.apply(everything, scale, parts.scaling.of_layer)
            for entry in everything:
                entry.write()

    def _collect(self) -> list[GroupGradients]:
        """Return the layers with a ``.grad``; all layers if results are exchanged, so that ranks agree."""
        found = []
        for group in self._parts.groups:
            members = [
                member
                for member in group.members
                if self._parts.shares_work or any(slot.parameter.grad is not None for slot in member.layer.slots)
            ]
            if members:
                found.append(GroupGradients(group, members))
        return found

    def _receive_rows(self, bucket: Sequence[GroupGradients]) -> dict[int, Tensor]:
        """Send each worker all rows of the sharded gradients that it preconditions.

        The rows come from the S ranks of the worker's copy of the model (under HSDP one replica, otherwise all ranks).
        Each other rank of these sends 1 / S of a layer's gradient.

        Returns:
            The rows by the parameter's ``id``, without plain parameters.
        """
        wanted = [
            (slot, entry.group.role.assignment.workers)
            for entry in bucket
            for member in entry.members
            for slot in member.layer.slots
        ]
        return collect_rows(wanted, _gradient_rows, self._parts.runtime, "gradients")

    def _clear_unusable(self, entries: Sequence[GroupGradients]) -> None:
        """Make gradients that are not finite or unusable zero, and count them and the layers that fell back."""
        counters = self._parts.failure_counters
        for entry in entries:
            entry.failed = ~entry.inner.isfinite()
            entry.clear_(entry.failed)
            counters.count_skipped_gradients(entry.group, entry.blocks, entry.failed)
            counters.record_levels(entry.group, entry.members, entry.layer_levels)


def _buckets(entries: Sequence[GroupGradients]) -> Iterator[list[GroupGradients]]:
    """Yield groups whose sharded gradients are collected together; the same on all ranks."""
    bucket: list[GroupGradients] = []
    size = 0
    for entry in entries:
        group = entry.group
        added = group.size * group.outputs * group.inputs * entry.dtype.itemsize
        if bucket and size + added > _BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(entry)
        size += added
    if bucket:
        yield bucket


def _gradient_rows(slot: Slot, rows: range) -> Tensor:
    """Return rows of the gradient in the parameter's dtype, zeros if there is no gradient."""
    values, parameter = held_rows(slot, rows), slot.parameter
    if values is None:
        return torch.zeros(len(rows), *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    return values.to(parameter.dtype)
