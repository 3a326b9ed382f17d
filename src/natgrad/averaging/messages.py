"""Tensors of a model as a few flat messages, one or more for each dtype and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from natgrad.distributed import fsdp
from natgrad.errors import require

MESSAGE_BYTES = 64 << 20
"""Default size of a message: large enough for the link, small enough to pack one while another travels."""


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor, or a plain tensor itself, detached; no copy."""
    held = fsdp.local(tensor)
    return held.detach()


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in memory order, as a vector ``[numel]`` that shares its memory.

    Raises:
        ValueError: if it has gaps or overlaps itself.
    """
    held = local(tensor)
    if not held.is_contiguous():
        held = held.permute(sorted(range(held.ndim), key=held.stride, reverse=True))
        require(held.is_contiguous(), "tensor", tuple(tensor.stride()), "stored without gaps (dense strides)")
    return held.view(-1)


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of the flat tensor number ``index``."""

    index: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass
class Message:
    """Pieces that are sent end to end as one vector."""

    dtype: torch.dtype
    device: torch.device
    pieces: list[Piece] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """The elements of the message."""
        return sum(piece.numel for piece in self.pieces)


class Packing:
    """The layout of a list of tensors in flat messages.

    Attributes:
        messages: The messages, none longer than the limit: a longer tensor continues in the next message.
    """

    def __init__(self, tensors: Sequence[Tensor], message_bytes: int = MESSAGE_BYTES) -> None:
        """Lay out `tensors`, in their order, in messages of at most `message_bytes`; allocates nothing."""
        self.messages: list[Message] = []
        unfinished: dict[tuple[torch.dtype, torch.device], Message] = {}
        self._layouts = _memory_layouts(tensors)
        for index, (shape, _, dtype, device) in enumerate(self._layouts):
            numel, start, limit = prod(shape), 0, max(1, message_bytes // dtype.itemsize)
            while start < numel:
                message = unfinished.get((dtype, device))
                if message is None or message.numel == limit:
                    message = unfinished[dtype, device] = Message(dtype, device)
                    self.messages.append(message)
                stop = min(numel, start + limit - message.numel)
                message.pieces.append(Piece(index, start, stop))
                start = stop

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors have the shapes, strides, dtypes and devices that this was made for."""
        return self._layouts == _memory_layouts(tensors)

    def empty(self) -> list[Tensor]:
        """Return uninitialised messages."""
        return [torch.empty(message.numel, dtype=message.dtype, device=message.device) for message in self.messages]

    def pieces(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return, for each message, views of the parts of `tensors` that it consists of."""
        flats = [flat(tensor) for tensor in tensors]
        return [[flats[p.index][p.start : p.stop] for p in message.pieces] for message in self.messages]

    def views(self, vectors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return, for each message, views of the same parts in `vectors`."""
        return [
            list(vector.split([piece.numel for piece in message.pieces]))
            for vector, message in zip(vectors, self.messages, strict=True)
        ]

    def pack(self, tensors: Sequence[Tensor], vectors: Sequence[Tensor]) -> None:
        """Copy `tensors` into messages."""
        for views, pieces in zip(self.views(vectors), self.pieces(tensors), strict=True):
            torch._foreach_copy_(views, pieces)

    def unpack(self, vectors: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Copy messages into `tensors`."""
        for views, pieces in zip(self.views(vectors), self.pieces(tensors), strict=True):
            torch._foreach_copy_(pieces, views)


def _memory_layouts(
    tensors: Sequence[Tensor],
) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]]:
    return [(tuple(shard.shape), shard.stride(), shard.dtype, shard.device) for shard in map(local, tensors)]
