"""Statistics that are sent during the backward pass: placement "pipelined" (after SPD-KFAC, Shi 2021, section IV-A).

Layers are cut into buckets of fixed order and size, from the last layer of the model to the first, as
``DistributedDataParallel`` does with gradients. A bucket is sent once DDP has started to reduce the gradients of all of
its layers, because their statistics are then complete. DDP's buckets, and so these, have the same order on all ranks.
The last bucket is sent in ``step``.

A backward pass that DDP does not synchronize (``no_sync``) adds to the buckets that the next pass sends. A second
synchronized pass before ``step`` sends its statistics separately, and the sums are added when they have arrived.
Without DDP's hook (FSDP2, a communication hook of the user, no wrapper) all buckets are sent in
``step``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from typing_extensions import override

from natgrad.capture.sums import Bucket, SampleCount, Shares, StatisticsBuffer
from natgrad.distributed import Communicator, narrower
from natgrad.distributed.buckets import LEAST_MESSAGES
from natgrad.distributed.ddp import Listener, relay_of
from natgrad.errors import NatgradError
from natgrad.refresh.rule import Side
from natgrad.specs import Statistic
from natgrad.state.block_group import BlockGroup, LayerBlocks


class BucketedStatistics(StatisticsBuffer):
    """Raw sums in buckets that are sent when DDP has started to reduce the gradients of their layers."""

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        *,
        names: Sequence[str],
        bucket: int,
        runtime: Communicator,
        wire: torch.dtype | None,
    ) -> None:
        """Lay out buckets of at most `bucket` bytes, for layers with these `names`, in the order of the model."""
        self._names, self._limit = list(names), bucket
        self._runtime, self._wire = runtime, wire
        # By the number of the bucket: those in progress, in the order of sending, and the sums of earlier passes.
        self._sent: dict[int, Bucket] = {}
        self._received: dict[int, Bucket] = {}
        self._reduced: set[int] = set()  # the ids of parameters that DDP has reduced in this pass
        self._next = 0  # the next bucket to be sent in this pass
        self._gain: float | Tensor = 1.0  # of the step
        self._may_send = False  # whether all ranks have made the process group, which they do in the first step
        super().__init__(groups, fused=True)

    @override
    def _choose(self, sides: frozenset[Side]) -> None:
        super()._choose(sides)
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
    def _make_buckets(self, specs: Mapping[str, list[Statistic]]) -> list[Bucket]:
        layers = [(*self._members[name], specs[name]) for name in reversed(self._names) if name in specs]
        sizes = [Bucket([layer]).numel * narrower(self._wire, layer[0].dtype).itemsize for layer in layers]
        limit = min(self._limit, sum(sizes) / LEAST_MESSAGES)
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
        return [Bucket(layers) for layers in buckets]

    # --- In the backward pass -----------------------------------------------------------------------------------

    def send_complete(self, parameters: Iterable[Tensor], flush: Callable[[str], None], *, first: bool) -> None:
        """Send the buckets that are complete after DDP has reduced the gradients of `parameters`.

        `first`: they are the first ones of a backward pass. `flush` is called with each layer before its sums are sent.
        """
        if first:
            self._reduced.clear()
            self._next = 0
        self._reduced.update(map(id, parameters))
        last = len(self._buckets) - 1
        while self._may_send and self._next < last and self._parameters[self._next] <= self._reduced:
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
        """Wait for the sums of a bucket in progress, if any, and add them to those of earlier passes."""
        sent = self._sent.pop(index, None)
        if sent is not None:
            sent.wait()
            if index in self._received:
                sent.add(self._received[index])
            self._received[index] = sent

    # --- In the step --------------------------------------------------------------------------------------------

    @override
    def close(self, shares: Shares, gain: float | Tensor) -> None:
        """Complete the buckets that have not been sent.

        Raises:
            NatgradError: if statistics were added after their bucket was sent, by a backward pass that DDP does not
                synchronize, or if ``step(count=...)`` says that not all samples count.
        """
        sent = {name for bucket in self._sent.values() for name in bucket.names}
        if not sent.isdisjoint(self._filled):
            raise NatgradError(
                "a backward pass without synchronization by DistributedDataParallel followed one with it before "
                "step(): under placement='pipelined' the last pass before step() must be synchronized",
                "order-of-calls",
            )
        if not sent.isdisjoint(shares):
            raise NatgradError(
                "step(count=...) is not supported under placement='pipelined', which sends statistics before step(): "
                "pass another placement",
                "count",
            )
        for bucket in self._unsent:
            bucket.close(self.sample_counts, shares, gain)
        self._gain = gain

    @property
    def _unsent(self) -> list[Bucket]:
        """The buckets to be sent in the step."""
        return [bucket for index, bucket in enumerate(self._buckets) if index not in self._sent]

    @override
    def reduce(self, runtime: Communicator, wire: torch.dtype | None) -> None:
        self._may_send = True
        unsent = self._unsent
        for bucket in unsent:
            bucket.post(runtime, wire, runtime.background)
        for index in list(self._sent):
            self._receive(index)
            received = self._received.pop(index)
            received.scale_gradients(self._gain)  # equal on all ranks, because under DDP all make equally many passes
            self._buckets[index].add(received)
        for bucket in unsent:
            bucket.wait()

    @override
    def reset(self) -> None:
        super().reset()
        self.abandon()  # sums sent since the last step belong to discarded passes
        self._reduced.clear()
        self._next = 0

    @override
    def abandon(self) -> None:
        for sent in self._sent.values():
            sent.drop()
        self._sent.clear()
        self._received.clear()


def listen(model: nn.Module, listener: Listener) -> None:
    """Call `listener`, a bound method that is held weakly, with each bucket that DDP has started to reduce.

    It replaces an earlier listener. Does nothing if `model` is not wrapped in DDP or has another communication hook.
    """
    with suppress(RuntimeError):  # there is a hook already
        relay = relay_of(model)
        if relay is not None:
            relay.listener = weakref.WeakMethod(listener)
