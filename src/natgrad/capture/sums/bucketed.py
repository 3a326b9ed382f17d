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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from natgrad.capture.sums.messages import Bucket, Portion, SampleCount, Shares, neighbours
from natgrad.capture.sums.sums import Gain, StatisticsBuffer
from natgrad.distributed import Communicator, Work, narrower
from natgrad.errors import NatgradError
from natgrad.state.block_group import BlockGroup, LayerBlocks

# All factors are cut into so many buckets or more, where there are as many layers: else those of a small model would
# all be in the last one.
_LEAST_BUCKETS = 8


@dataclass
class _Departure:
    """A bucket that has left in a backward pass.

    Attributes:
        message: Its sums.
        posted: What to wait for.
        before: What has arrived of earlier passes of the same step.
    """

    message: Bucket
    posted: Work
    before: Bucket | None

    def arrive(self) -> Bucket:
        """Wait, and return the sums of all passes."""
        self.posted.wait()
        if self.before is not None:
            self.message.take_back(self.before)
        return self.message


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
        gain: Gain,
    ) -> None:
        """Lay out the buckets.

        Args:
            groups: The groups; all ranks receive the sums of all of them.
            names: The names of the layers, in the order of the model.
            bucket: The most bytes of a bucket of several layers.
            runtime: The ranks.
            wire: The dtype in which sums travel, if narrower than their own.
            gain: What `close` is given, by the number of backward passes.
        """
        self._names, self._bucket = list(names), bucket
        self._runtime, self._wire, self._gain = runtime, wire, gain
        self._departures: dict[int, _Departure] = {}  # by the number of the bucket, in the order in which they left
        self._counted: dict[str, SampleCount] = {}  # what the departures have counted
        self._reduced: set[int] = set()  # the parameters that DDP has reduced in this pass, by their `id`
        self._next = 0  # the bucket that leaves next in this pass
        self._gain_now: float | Tensor = 1.0  # that of the step
        self._may_leave = False  # from the first step on, in which all ranks make a queue for them
        super().__init__(groups, fused=True)

    def _laid_out(self, portions: Mapping[str, Portion]) -> list[Bucket]:
        layers = [(*self._members[name], portions[name]) for name in reversed(self._names) if name in portions]
        sizes = [Bucket(neighbours([layer])).numel * narrower(self._wire, layer[0].dtype).itemsize for layer in layers]
        limit = min(self._bucket, sum(sizes) / _LEAST_BUCKETS)
        buckets: list[list[tuple[BlockGroup, LayerBlocks, Portion]]] = []
        size = 0
        for layer, own in zip(layers, sizes, strict=True):
            group = layer[0]
            last = buckets[-1][-1][0] if buckets else group
            fits = size + own <= limit and (last.dtype, last.device) == (group.dtype, group.device)
            if buckets and fits:
                buckets[-1].append(layer)
                size += own
            else:
                buckets.append([layer])
                size = own
        return [Bucket(neighbours(own), self._kind) for own in buckets]

    def _arrange(self, messages: list[Bucket]) -> None:
        super()._arrange(messages)
        self._parameters = [
            {
                id(slot.parameter)
                for piece in message.pieces
                for member in piece.members
                for slot in member.layer.slots
                if slot.parameter.requires_grad
            }
            for message in messages
        ]

    # --- In the backward pass -----------------------------------------------------------------------------------

    def ready(self, parameters: Iterable[Tensor], *, first: bool) -> list[str]:
        """Note that DDP has reduced some gradients; return the layers of the buckets that `leave` is to send.

        Args:
            parameters: Those of one of its buckets.
            first: Whether it is the first bucket of a pass.
        """
        if first:
            self._reduced.clear()
            self._next = 0
        self._reduced.update(map(id, parameters))
        return [name for index in self._complete() for name in self._messages[index].places]

    def leave(self) -> None:
        """Send the buckets that are complete; how many passes accumulate is known only in the step."""
        gain = self._gain(1)
        for index in self._complete():
            message = self._messages[index]
            message.close({name: self._count_rest(name) for name in message.places}, {}, gain)
            given = message.give()
            self._filled.difference_update(message.places)
            earlier = self._departures.pop(index, None)
            before = None if earlier is None else earlier.arrive()
            self._departures[index] = _Departure(given, self._post(given), before)
            self._next = index + 1

    def _complete(self) -> range:
        if not self._may_leave:
            return range(0)
        stop = self._next
        while stop < len(self._messages) - 1 and self._parameters[stop] <= self._reduced:
            stop += 1
        return range(self._next, stop)

    def _count_rest(self, name: str) -> SampleCount:
        """Return what of a layer has been counted since its last departure."""
        tally, before = self.tallies[name], self._counted.get(name, SampleCount())
        self._counted[name] = replace(tally)
        return SampleCount(
            samples=tally.samples - before.samples, rows=tally.rows - before.rows, beyond=tally.beyond - before.beyond
        )

    def _post(self, message: Bucket) -> Work:
        return self._runtime.post_sum(message.allocate(), message.kinds, self._wire, self._runtime.background)

    # --- In the step --------------------------------------------------------------------------------------------

    def close(self, shares: Shares, gain: float | Tensor) -> None:
        """Make ready what has not left yet; see `StatisticsBuffer.close`.

        Raises:
            NatgradError: if what has left lacks something: a backward pass came after the one that DDP synchronised,
                or ``step(count=...)`` says that not all samples count.
        """
        left = {name for departure in self._departures.values() for name in departure.message.places}
        if not left.isdisjoint(self._filled):
            raise NatgradError(
                "a backward pass that DistributedDataParallel does not synchronise came after one that it does, before "
                "step(): under placement='pipelined' the last pass before step() must be synchronised"
            )
        if any(shares.get(name, 1.0) != 1.0 for name in left):
            raise NatgradError(
                "step(count=...) comes after statistics have left under placement='pipelined': pass another placement"
            )
        for index in self._staying:
            self._messages[index].close(self.tallies, shares, gain)
        self._gain_now = gain

    @property
    def _staying(self) -> list[int]:
        """The buckets that leave in the step."""
        return [index for index in range(len(self._messages)) if index not in self._departures]

    def travel(self, runtime: Communicator, wire: torch.dtype | None) -> None:
        """Send the closed messages, and wait for all; see `StatisticsBuffer.travel`."""
        self._may_leave = True
        posted = [self._post(self._messages[index]) for index in self._staying]
        once = self._gain(1)
        for index, departure in self._departures.items():
            arrived = departure.arrive()
            arrived.rescale(once, self._gain_now)  # the same on all ranks, which under DDP make as many passes
            self._messages[index].take_back(arrived)
        self._departures.clear()
        for each in posted:
            each.wait()

    def reset(self) -> None:
        """Begin anew; what has left since the last step was of passes that are thrown away."""
        super().reset()
        self.abandon()
        self._counted.clear()
        self._reduced.clear()
        self._next = 0

    def abandon(self) -> None:
        """Drop what has left, once the other ranks have sent theirs."""
        for departure in self._departures.values():
            departure.posted.drop()
        self._departures.clear()
