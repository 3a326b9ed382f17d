"""Statistics that are sent with the gradients that natgrad averages, during the backward pass (Osawa 2019).

Whether a pass is the last one of a step is known only in the step (`natgrad.preconditioner.gradients.reduction`). So
copies are sent, and the sums themselves stay until all ranks know that these were right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import torch
from torch.distributed import ProcessGroup
from typing_extensions import override

from natgrad.capture.sums import Bucket, StatisticsBuffer, post_sums
from natgrad.distributed import Communicator
from natgrad.distributed.communicator import Work
from natgrad.state.block_group import BlockGroup


class OverlappedStatistics(StatisticsBuffer):
    """Raw sums of which copies are sent when the gradients of their layers have been sent."""

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        *,
        chunk_of: Mapping[str, int],
        runtime: Communicator,
        wire: torch.dtype | None,
    ) -> None:
        """Lay out buckets for each chunk of gradients; `chunk_of` has the number of that of each layer."""
        self._chunk_of, self._runtime, self._wire = chunk_of, runtime, wire
        self._sent: list[tuple[Bucket, Bucket]] = []  # buckets with their copies
        self._works: list[Work] = []
        super().__init__(groups, fused=True)

    @override
    def _chunk(self, layer: str) -> int:
        return self._chunk_of[layer]

    def layers_of(self, chunk: int) -> list[str]:
        """Return the layers whose sums are sent with a chunk of gradients."""
        return [name for name in self._specs if self._chunk_of[name] == chunk]

    def send(self, chunk: int, gain: float | torch.Tensor, group: ProcessGroup | None) -> None:
        """Send copies of the sums of the layers of a chunk in the queue of a group; `gain` as of `close`."""
        found = [bucket for bucket in self._buckets if self._chunk_of[bucket.names[0]] == chunk]
        copies = [copy(bucket) for bucket in found]
        for bucket, sent in zip(found, copies, strict=True):
            sent.release()
            sent.allocate().copy_(bucket.allocate())
            sent.close(self.sample_counts, {}, gain)
        self._sent += zip(found, copies, strict=True)
        self._works += post_sums(copies, self._runtime, self._wire, group)

    @override
    def reduce(self, runtime: Communicator, wire: torch.dtype | None) -> None:
        if not self._sent:
            super().reduce(runtime, wire)
        for work in self._works:
            work.wait()
        for bucket, sent in self._sent:
            bucket.buffer, bucket.views = sent.buffer, sent.views
        self._sent, self._works = [], []

    @override
    def reset(self) -> None:
        super().reset()
        self.abandon()

    @override
    def abandon(self) -> None:
        for work in self._works:
            work.drop()
        self._sent, self._works = [], []
