"""Sums over the nodes: each local rank reduces its share across nodes, then the node gathers the shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from natgrad.averaging.compression import DeltaCompression
from natgrad.averaging.messages import MESSAGE_BYTES, Packing
from natgrad.averaging.nodes import Grid
from natgrad.distributed import Work
from natgrad.linalg import tensor_on


class PendingAverage:
    """An exchange between the nodes that is under way.

    Attributes:
        packing: The layout of the tensors in messages.
        sent: The messages that this node has sent; empty unless they were to be kept.
        summed: The messages of all nodes, summed by weight, valid after `wait`.
        nodes: The sum of the nodes' weights, P.
    """

    def __init__(self, packing: Packing, sent: list[Tensor], summed: list[Tensor], nodes: int) -> None:
        """Hold the messages; `Exchange.send` adds what to wait for."""
        self.packing, self.sent, self.summed, self.nodes = packing, sent, summed, nodes
        self.is_gradient_worker: list[Work] = []
        self.gather: Callable[[], None] | None = None

    def wait(self) -> None:
        """Wait until the sums are there; a second time there is nothing to wait for.

        Collective in the node, unless each of its ranks holds tensors of its own.

        Raises:
            NatgradError: if another rank has stopped.
        """
        for work in self.is_gradient_worker:
            work.wait()
        if self.gather is not None:
            self.gather()
        self.is_gradient_worker, self.gather = [], None


class Exchange:
    """Averages one list of tensors over the nodes, again and again, in buffers that it keeps.

    Tensors that are the same on all ranks of a node are cut into shares: local rank i sums share i with the ranks of
    the same local index on the other nodes, and the shares are then gathered in the node. If tensors differ within a
    node, share i is that of local rank i. Local indices that not every node has send no share.
    """

    def __init__(self, grid: Grid, kind: str, *, per_rank: bool = False, message_bytes: int = MESSAGE_BYTES) -> None:
        """Allocate nothing yet.

        Args:
            grid: The nodes.
            kind: The name of the tensors in `Grid.traffic`.
            per_rank: Whether each rank of a node holds tensors of its own (shards), of which it exchanges all.
            message_bytes: The largest message.
        """
        self.per_rank = per_rank
        self._grid, self._kind, self._message_bytes = grid, kind, message_bytes
        self._weight = grid.weights[grid.node]
        self._packing = Packing([])
        self._sent: list[Tensor] = []
        self._summed: list[Tensor] = []

    def packing(self, tensors: Sequence[Tensor]) -> Packing:
        """Return the layout of tensors; the same object while shapes, strides, dtypes and devices stay."""
        if not self._packing.fits(tensors):
            self._packing = Packing(tensors, self._message_bytes)
            self.release()
        return self._packing

    def release(self) -> None:
        """Free the buffers."""
        self._sent, self._summed = [], []

    def send(
        self,
        tensors: Sequence[Tensor],
        *,
        keep: bool = False,
        wire: torch.dtype | None = None,
        compression: DeltaCompression | None = None,
        blocking: bool = False,
    ) -> PendingAverage:
        """Begin to sum a copy of `tensors` over the nodes; they may change meanwhile. One exchange at a time.

        Args:
            tensors: The same in number and layout on all ranks.
            keep: Whether `PendingAverage.sent` is needed.
            wire: The dtype in which they travel, if narrower than their own; `sent` is rounded likewise.
            compression: Sends differences from its reference, in its dtype, instead.
            blocking: Whether all ranks wait at once: a narrow message may then send more and round less.
        """
        pending = self.buffers(tensors, keep=keep)
        packing = pending.packing
        if compression is not None:
            wire = compression.prepare(packing)
        views = packing.views(pending.summed)
        for index, (vector, pieces) in enumerate(zip(pending.summed, packing.pieces(tensors), strict=True)):
            torch._foreach_copy_(views[index], pieces)
            if compression is not None:
                vector.sub_(compression.reference[index])
            self._weigh(vector, pending.sent[index] if keep else None, wire)
            share = self._share(vector)
            if len(share):  # this message is on its way while the next one is packed
                pending.is_gradient_worker.append(self._sum(share, wire, blocking=blocking))
        if not self.per_rank:
            pending.gather = lambda: self._gather(pending.summed)
        return pending

    def buffers(self, tensors: Sequence[Tensor], *, keep: bool = False) -> PendingAverage:
        """Return the buffers that `send` fills, with nothing under way."""
        packing = self.packing(tensors)
        self._summed = self._summed or packing.empty()
        self._sent = (self._sent or packing.empty()) if keep else []
        return PendingAverage(packing, self._sent, self._summed, self._grid.nodes)

    def mean_(
        self,
        tensors: Sequence[Tensor],
        wire: torch.dtype | None = None,
        compression: DeltaCompression | None = None,
    ) -> None:
        """Average `tensors` over the nodes, in place, and wait: afterwards all ranks hold the same bits.

        Args:
            tensors: As in `send`.
            wire: As in `send`.
            compression: As in `send`; its reference becomes the mean.
        """
        pending = self.send(tensors, wire=wire, compression=compression, blocking=True)
        pending.wait()
        vectors = pending.summed
        if vectors and pending.nodes > 1:
            torch._foreach_div_(vectors, pending.nodes)
        if compression is not None:
            compression.move_(vectors)
            vectors = compression.reference
        pending.packing.unpack(vectors, tensors)

    def sum_inside_(self, tensors: Sequence[Tensor]) -> None:
        """Sum `tensors` over the ranks of the node, in place, and wait; collective in it."""
        inside = self._grid.inside
        packing = self.packing(tensors)
        self._summed = self._summed or packing.empty()
        packing.pack(tensors, self._summed)
        works = [inside.post_sum(v, {self._kind: v.numel()}, None, inside.group) for v in self._summed]
        for work in works:
            work.wait()
        packing.unpack(self._summed, tensors)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Give all ranks the tensors of rank 0; of shards, those of the first node."""
        between, inside = self._grid.between, self._grid.inside
        if between.ranks == inside.ranks == 1:
            return
        packing = self.packing(tensors)
        vectors = packing.empty()
        packing.pack(tensors, vectors)
        messages = [(0, vector, {self._kind: vector.numel()}) for vector in vectors]
        if between.ranks > 1 and (self.per_rank or self._grid.local == 0):
            between.broadcast_(messages)
        if inside.ranks > 1 and not self.per_rank:
            inside.broadcast_(messages)
        packing.unpack(vectors, tensors)

    def _weigh(self, vector: Tensor, sent: Tensor | None, wire: torch.dtype | None) -> None:
        """Multiply a message by this node's weight, and keep in `sent` what the other nodes will see of it."""
        rounds = _rounds(wire, vector)
        if sent is not None and not rounds:
            sent.copy_(vector)
        if self._weight != 1:
            vector.mul_(self._weight)
        if sent is not None and rounds:
            sent.copy_(vector.to(wire)).div_(self._weight)

    def _sum(self, share: Tensor, wire: torch.dtype | None, *, blocking: bool) -> Work:
        """Begin to sum a share over the nodes."""
        between, kinds = self._grid.between, {self._kind: len(share)}
        if blocking or between.ranks == 1:
            return between.post_sum(share, kinds, wire, between.group)
        narrow = wire if wire is not None and _rounds(wire, share) else share.dtype
        return between.post_sum_as(share, kinds, narrow)

    def _share(self, vector: Tensor) -> Tensor:
        """Return the part of a message that this rank sums: nothing where not every node has its local index."""
        if self.per_rank:
            return vector
        local, shares = self._grid.local, self._grid.smallest
        return vector.tensor_split(shares)[local] if local < shares else vector[:0]

    def _gather(self, vectors: Sequence[Tensor]) -> None:
        """Collect the shares of all messages in the node."""
        inside = self._grid.inside
        if inside.ranks == 1:
            return
        # Shares may be of different sizes, and on larger nodes some ranks have none: each owner broadcasts its own.
        shares = [pair for vector in vectors for pair in enumerate(vector.tensor_split(self._grid.smallest))]
        inside.broadcast_((owner, share, {self._kind: len(share)}) for owner, share in shares if len(share))


class NodeGradients:
    """Averages ``.grad`` over the ranks of a node that had a batch, where no wrapper does."""

    def __init__(self, grid: Grid, message_bytes: int = MESSAGE_BYTES) -> None:
        """Allocate nothing yet."""
        self._grid = grid
        self._exchange = Exchange(grid, "gradients", message_bytes=message_bytes)

    def average_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make ``.grad`` the average over the node; collective in it.

        A rank whose gradients are all None had no batch: it receives the average of the others. A gradient that is
        None on all ranks of the node stays None.

        Args:
            parameters: The trainable ones, the same on every rank.
        """
        if self._grid.inside.ranks == 1 or not parameters:
            return
        used = [parameter.grad is not None for parameter in parameters]
        flags = tensor_on(parameters[0].device, [any(used), *used], torch.float32)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self._exchange.sum_inside_([*gradients, flags])
        for device in {gradient.device for gradient in gradients}:
            count = flags[0].clamp(min=1).to(device)
            torch._foreach_div_([gradient for gradient in gradients if gradient.device == device], count)
        if not all(used):  # only here, where it is rare, the host waits for the device
            for parameter, users in zip(parameters, flags[1:].tolist(), strict=True):
                if not users:
                    parameter.grad = None


def _rounds(wire: torch.dtype | None, vector: Tensor) -> bool:
    """Return whether numbers are rounded on the wire."""
    return wire is not None and wire.itemsize < vector.dtype.itemsize
