"""Statistics that leave during the backward pass: placement "pipelined" (after SPD-KFAC, Shi 2021, section IV-A).

The layers are cut into buckets of a fixed order and size, from the last layer of the model to the first, as
``DistributedDataParallel`` cuts its gradients. Once DDP has begun to reduce the gradients of all parameters of a
bucket's layers, this pass adds nothing more to their statistics, and the bucket leaves: in the same order on all
ranks, because all ranks see DDP's buckets in the same order. The last bucket leaves in ``step``, with what only
``step`` knows.

A backward pass that DDP does not synchronise (``no_sync``) adds to what leaves in the next one. A second synchronised
pass before ``step`` sends what it has added itself; the two are summed up when they have arrived. Without its
hook (FSDP2, a communication hook of the user's, ``gradients="reduce"``, no wrapper) all buckets leave in ``step``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from natgrad.capture.sums import Bucket, Choice, SampleCount, Shares, StatisticsBuffer
from natgrad.distributed import Communicator, narrower
from natgrad.errors import NatgradError
from natgrad.specs import Statistic
from natgrad.state.block_group import BlockGroup, LayerBlocks

# All factors are cut into so many buckets or more, where there are as many layers: else those of a small model would
# all be in the last one.
_LEAST_BUCKETS = 8


class BucketedStatistics(StatisticsBuffer):
    """Raw sums in buckets that leave as soon as DDP has reduced the gradients of their layers."""

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        *,
        names: Sequence[str],
        bucket: int,
        runtime: Communicator,
        wire: torch.dtype | None,
    ) -> None:
        """Lay out the buckets.

        Args:
            groups: The groups; all ranks receive the sums of all of them.
            names: The names of the layers, in the order of the model.
            bucket: The most bytes of a bucket of several layers.
            runtime: The ranks.
            wire: The dtype in which sums travel, if narrower than their own.
        """
        self._names, self._limit = list(names), bucket
        self._runtime, self._wire = runtime, wire
        # By the number of the bucket: what is under way, in the order in which it left, and what came of earlier passes
        self._sent: dict[int, Bucket] = {}
        self._received: dict[int, Bucket] = {}
        self._reduced: set[int] = set()  # the parameters that DDP has reduced in this pass, by their `id`
        self._next = 0  # the bucket that leaves next in this pass
        self._gain: float | Tensor = 1.0  # that of the step
        self._may_leave = False  # from the first step on, in which all ranks make a queue for them
        super().__init__(groups, fused=True)

    @override
    def _choose(self, choice: Choice) -> None:
        super()._choose(choice)
        self._parameters = [
            {
                id(slot.parameter)
                for run in bucket.runs
                for member in run.members
                for slot in member.layer.slots
                if slot.parameter.requires_grad
            }
            for bucket in self._buckets
        ]

    @override
    def _laid_out(self, specs: Mapping[str, list[Statistic]]) -> list[Bucket]:
        layers = [(*self._members[name], specs[name]) for name in reversed(self._names) if name in specs]
        sizes = [Bucket([layer], self._kind).numel * narrower(self._wire, layer[0].dtype).itemsize for layer in layers]
        limit = min(self._limit, sum(sizes) / _LEAST_BUCKETS)
        buckets: list[list[tuple[BlockGroup, LayerBlocks, list[Statistic]]]] = []
        filled = 0
        for layer, size in zip(layers, sizes, strict=True):
            group, last = layer[0], buckets[-1][-1][0] if buckets else layer[0]
            if buckets and filled + size <= limit and (last.dtype, last.device) == (group.dtype, group.device):
                buckets[-1].append(layer)
                filled += size
            else:
                buckets.append([layer])
                filled = size
        return [Bucket(layers, self._kind) for layers in buckets]

    # --- In the backward pass -----------------------------------------------------------------------------------

    def leave(self, parameters: Iterable[Tensor], flush: Callable[[str], None], *, first: bool) -> None:
        """Send the buckets that are complete, now that DDP has reduced those of some parameters.

        `flush` is called with each layer before its sums leave. `first`: It is DDP's first bucket of a pass.
        """
        if first:
            self._reduced.clear()
            self._next = 0
        self._reduced.update(map(id, parameters))
        last = len(self._buckets) - 1
        while self._may_leave and self._next < last and self._parameters[self._next] <= self._reduced:
            self._send(self._next, flush)
            self._next += 1

    def _send(self, index: int, flush: Callable[[str], None]) -> None:
        self._receive(index)
        bucket = self._buckets[index]
        for name in bucket.names:
            flush(name)
        bucket.close(self.sample_counts, {}, 1.0)  # the gain is known only in the step
        self.sample_counts.update({name: SampleCount() for name in bucket.names})
        self._filled.difference_update(bucket.names)
        self._sent[index] = bucket.split_off()
        self._sent[index].post(self._runtime, self._wire, self._runtime.background)

    def _receive(self, index: int) -> None:
        """Wait for what is under way of a bucket, so that no more than one pass is, and add up the passes."""
        sent = self._sent.pop(index, None)
        if sent is not None:
            sent.wait()
            if index in self._received:
                sent.add(self._received[index])
            self._received[index] = sent

    # --- In the step --------------------------------------------------------------------------------------------

    @override
    def close(self, shares: Shares, gain: float | Tensor) -> None:
        """Make ready what has not left yet.

        Raises:
            NatgradError: if what has left lacks something: a backward pass came after the one that DDP synchronised,
                or ``step(count=...)`` says that not all samples count.
        """
        left = {name for bucket in self._sent.values() for name in bucket.names}
        if not left.isdisjoint(self._filled):
            raise NatgradError(
                "a backward pass that DistributedDataParallel does not synchronise came after one that it does, before "
                "step(): under placement='pipelined' the last pass before step() must be synchronised"
            )
        if any(shares.get(name, 1.0) != 1.0 for name in left):
            raise NatgradError(
                "step(count=...) comes after statistics have left under placement='pipelined': pass another placement"
            )
        for bucket in self._staying:
            bucket.close(self.sample_counts, shares, gain)
        self._gain = gain

    @property
    def _staying(self) -> list[Bucket]:
        """The buckets that leave in the step."""
        return [bucket for index, bucket in enumerate(self._buckets) if index not in self._sent]

    @override
    def travel(self, runtime: Communicator, wire: torch.dtype | None) -> None:
        self._may_leave = True
        staying = self._staying
        for bucket in staying:
            bucket.post(runtime, wire, runtime.background)
        for index in list(self._sent):
            self._receive(index)
            received = self._received.pop(index)
            received.scale_gradients(self._gain)  # the same on all ranks, which under DDP make as many passes
            self._buckets[index].add(received)
        for bucket in staying:
            bucket.wait()

    @override
    def reset(self) -> None:
        super().reset()
        self.abandon()  # what was sent since the last step is of passes that are thrown away
        self._reduced.clear()
        self._next = 0

    @override
    def abandon(self) -> None:
        for sent in self._sent.values():
            sent.drop()
        self._sent.clear()
        self._received.clear()
