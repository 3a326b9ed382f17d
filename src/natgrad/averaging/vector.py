"""Tensors of a model as a few flat messages, one or more for each dtype and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from natgrad.errors import require
from natgrad.stacks.shards import is_sharded

MESSAGE_BYTES = 64 << 20
"""A message's size unless told otherwise: large enough for the link, small enough to pack one while another travels."""


def local(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor that this rank holds, without a graph; of a plain tensor all; no copy."""
    held: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return held.detach()


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in the order of memory, as a vector ``[numel]`` that shares it.

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
        """How many there are."""
        return self.stop - self.start


@dataclass
class Message:
    """What travels as one vector: pieces end to end."""

    dtype: torch.dtype
    device: torch.device
    pieces: list[Piece] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """The elements of the message."""
        return sum(piece.numel for piece in self.pieces)


class Packing:
    """Where in which message each element of some tensors lies.

    Attributes:
        messages: The messages, none longer than the budget: a tensor that is longer continues in the next one.
    """

    def __init__(self, tensors: Sequence[Tensor], budget: int = MESSAGE_BYTES) -> None:
        """Lay out `tensors`, in their order, in messages of at most `budget` bytes; nothing is allocated."""
        self.messages: list[Message] = []
        open_: dict[tuple[torch.dtype, torch.device], Message] = {}
        self._like = _likeness(tensors)
        for index, (shape, _, dtype, device) in enumerate(self._like):
            numel, start, limit = prod(shape), 0, max(1, budget // dtype.itemsize)
            while start < numel:
                message = open_.get((dtype, device))
                if message is None or message.numel == limit:
                    message = open_[dtype, device] = Message(dtype, device)
                    self.messages.append(message)
                stop = min(numel, start + limit - message.numel)
                message.pieces.append(Piece(index, start, stop))
                start = stop

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether some tensors lie like those that this was made for."""
        return self._like == _likeness(tensors)

    def empty(self) -> list[Tensor]:
        """Return uninitialised messages."""
        return [torch.empty(message.numel, dtype=message.dtype, device=message.device) for message in self.messages]

    def pieces(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return, for each message, the vectors in `tensors` that it is made of; they share the memory of these."""
        flats = [flat(tensor) for tensor in tensors]
        return [[flats[p.index][p.start : p.stop] for p in message.pieces] for message in self.messages]

    def views(self, vectors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the same of the messages themselves."""
        return [
            list(vector.split([piece.numel for piece in message.pieces]))
            for vector, message in zip(vectors, self.messages, strict=True)
        ]

    def pack(self, tensors: Sequence[Tensor], vectors: Sequence[Tensor]) -> None:
        """Copy `tensors` into messages."""
        for inside, outside in zip(self.views(vectors), self.pieces(tensors), strict=True):
            torch._foreach_copy_(inside, outside)

    def unpack(self, vectors: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Copy messages into `tensors`."""
        for inside, outside in zip(self.views(vectors), self.pieces(tensors), strict=True):
            torch._foreach_copy_(outside, inside)


def _likeness(tensors: Sequence[Tensor]) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]]:
    return [(tuple(held.shape), held.stride(), held.dtype, held.device) for held in map(local, tensors)]
