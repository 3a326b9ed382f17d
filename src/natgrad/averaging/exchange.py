"""Sums over the nodes: each local rank reduces its share across nodes, then the node gathers the shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from natgrad.averaging.nodes import Grid
from natgrad.distributed import Work, fsdp, narrower
from natgrad.errors import require
from natgrad.linalg import tensor_on

MESSAGE_BYTES = 64 << 20
"""Default size of the largest message between ranks. Longer messages are split."""


# --- Tensors as messages ----------------------------------------------------------------------------------------


def flat(tensor: Tensor) -> Tensor:
    """Return a detached view ``[numel]`` of the elements of a tensor, or of its local shard, in memory order.

    Raises:
        ValueError: if the tensor is not dense in memory.
    """
    held = fsdp.local(tensor).detach()
    if not held.is_contiguous():
        held = held.permute(sorted(range(held.ndim), key=held.stride, reverse=True))
        require(held.is_contiguous(), "tensor", tuple(tensor.stride()), "stored without gaps (dense strides)")
    return held.view(-1)


class Packing:
    """The layout of a list of tensors in flat messages, one for each dtype and device."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._layouts = _memory_layouts(tensors)
        members: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, (shape, _, dtype, device) in enumerate(self._layouts):
            if prod(shape):
                members.setdefault((dtype, device), []).append(index)
        self._members = list(members.values())
        self._sizes = [[prod(self._layouts[index][0]) for index in indices] for indices in self._members]

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each message."""
        return [sum(sizes) for sizes in self._sizes]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether `tensors` have the shapes, strides, dtypes and devices of this layout."""
        return self._layouts == _memory_layouts(tensors)

    def flats(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return, for each message, its tensors as flat views."""
        return [[flat(tensors[index]) for index in members] for members in self._members]

    def views(self, messages: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return, for each message, the views of its tensors in `messages`."""
        return [list(message.split(sizes)) for message, sizes in zip(messages, self._sizes, strict=True)]

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of `tensors` as messages."""
        return [torch.cat(flats) for flats in self.flats(tensors)]

    def unpack(self, messages: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Copy messages into `tensors`."""
        for views, flats in zip(self.views(messages), self.flats(tensors), strict=True):
            torch._foreach_copy_(flats, views)


def _memory_layouts(
    tensors: Sequence[Tensor],
) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]]:
    return [(tuple(shard.shape), shard.stride(), shard.dtype, shard.device) for shard in map(fsdp.local, tensors)]


# --- Exchanges --------------------------------------------------------------------------------------------------


@dataclass
class PendingAverage:
    """An exchange between nodes that is in progress, of tensors with the layout `packing`.

    Attributes:
        sent: The messages of this node; empty unless they were requested (``keep``).
        summed: The weighted sums of the messages of all nodes, valid after `wait`.
        nodes: P, the sum of the nodes' weights.
        works: The pending collectives between nodes.
        gather: Gathers the shares of the sums in the node. None: there are no shares.
    """

    packing: Packing
    sent: list[Tensor]
    summed: list[Tensor]
    nodes: int
    works: list[Work] = field(default_factory=list)
    gather: Callable[[], None] | None = None

    def wait(self) -> None:
        """Wait for the sums, once. Collective in the node, unless its ranks hold different tensors."""
        for work in self.works:
            work.wait()
        if self.gather is not None:
            self.gather()
        self.works, self.gather = [], None

    def mean(self) -> list[Tensor]:
        """Wait, divide `summed` by P in place, and return it."""
        self.wait()
        if self.summed and self.nodes > 1:
            torch._foreach_div_(self.summed, self.nodes)
        return self.summed


class Exchange:
    """Averages tensors over the nodes of a `grid`.

    Tensors that are equal on all ranks of a node are cut into shares. Local rank i sums share i with the ranks of the
    same local index on the other nodes; then the node gathers the shares. If tensors differ within a node, each rank
    sends its whole tensors. Local indices that not every node has send no share.
    """

    def __init__(self, grid: Grid, kind: str, *, per_rank: bool = False, message_bytes: int = MESSAGE_BYTES) -> None:
        """Initialize; `kind` names the messages in `traffic`; `per_rank`: the ranks of a node hold different shards."""
        self.grid = grid
        self._kind, self._per_rank, self._message_bytes = kind, per_rank, message_bytes

    def send(
        self,
        tensors: Sequence[Tensor],
        *,
        keep: bool = False,
        wire: torch.dtype | None = None,
        reference: Sequence[Tensor] = (),
        blocking: bool = False,
    ) -> PendingAverage:
        """Start to sum a copy of `tensors`, which have the same layouts on all ranks, over the nodes.

        Messages may be sent in the narrower dtype `wire`, in two collectives that round less if all ranks wait at once
        (`blocking`). With `reference`, messages that are equal on all nodes, only the differences from it are sent.
        With `keep` the messages of this node are kept as `PendingAverage.sent`.
        """
        packing, weight = Packing(tensors), self.grid.weights[self.grid.node]
        messages = packing.pack(tensors)
        if reference:
            torch._foreach_sub_(messages, list(reference))
        sent = [message.clone() for message in messages] if keep else []
        if messages and weight != 1:
            torch._foreach_mul_(messages, weight)
        for copy, message in zip(sent, messages, strict=False):
            narrow = narrower(wire, message.dtype)
            if narrow != message.dtype:  # the values that other nodes receive
                copy.copy_(message.to(narrow)).div_(weight)
        pending = PendingAverage(packing, sent, messages, self.grid.nodes)
        chunks = self._chunks(messages)
        shares = [share for share in map(self._share, chunks) if len(share)]
        between = self.grid.between
        pending.works = [
            between.post_sum(share, self._kind, wire, between.group, finishes_alone=not blocking) for share in shares
        ]
        if not self._per_rank:
            pending.gather = lambda: self._gather(chunks)
        return pending

    def mean_(self, tensors: Sequence[Tensor]) -> None:
        """Average `tensors` over the nodes in place, and wait. All ranks then hold the same bits."""
        pending = self.send(tensors, blocking=True)
        pending.packing.unpack(pending.mean(), tensors)

    def sum_inside_(self, tensors: Sequence[Tensor]) -> None:
        """Sum `tensors` over the ranks of the node in place, and wait; collective in the node."""
        inside = self.grid.inside
        packing = Packing(tensors)
        messages = packing.pack(tensors)
        for work in [inside.post_sum(c, self._kind, None, inside.group) for c in self._chunks(messages)]:
            work.wait()
        packing.unpack(messages, tensors)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast the tensors of rank 0, or the shards of the first node."""
        between, inside = self.grid.between, self.grid.inside
        packing = Packing(tensors)
        messages = packing.pack(tensors)
        owned = [(0, chunk) for chunk in self._chunks(messages)]
        if self._per_rank or self.grid.local == 0:
            between.broadcast_(owned, self._kind)
        if not self._per_rank:
            inside.broadcast_(owned, self._kind)
        packing.unpack(messages, tensors)

    def average_gradients_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average ``.grad`` over the ranks of the node that had a batch; collective in the node.

        A rank whose gradients are all None had no batch, and receives the average of the others. A gradient that is
        None on all ranks of the node stays None.
        """
        if self.grid.inside.ranks == 1 or not parameters:
            return
        used = [parameter.grad is not None for parameter in parameters]
        flags = tensor_on(parameters[0].device, [any(used), *used], torch.float32)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self.sum_inside_([*gradients, flags])
        for device in {gradient.device for gradient in gradients}:
            count = flags[0].clamp(min=1).to(device)
            torch._foreach_div_([gradient for gradient in gradients if gradient.device == device], count)
        if not all(used):  # waits for the device
            for parameter, users in zip(parameters, flags[1:].tolist(), strict=True):
                if not users:
                    parameter.grad = None

    def _chunks(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """Return `messages` as views of at most `message_bytes`."""
        return [c for message in messages for c in message.split(max(1, self._message_bytes // message.itemsize))]

    def _share(self, chunk: Tensor) -> Tensor:
        """Return the part of a message that this rank sums; empty if not every node has its local index."""
        if self._per_rank:
            return chunk
        index, shares = self.grid.local, self.grid.smallest
        return chunk.tensor_split(shares)[index] if index < shares else chunk[:0]

    def _gather(self, chunks: Sequence[Tensor]) -> None:
        """Gather the shares of all messages in the node, by broadcasts, since shares may differ in size."""
        shares = [pair for chunk in chunks for pair in enumerate(chunk.tensor_split(self.grid.smallest))]
        self.grid.inside.broadcast_([(owner, share) for owner, share in shares if len(share)], self._kind)
