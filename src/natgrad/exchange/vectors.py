"""Vectors of any dtypes from every rank to every other, in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from natgrad.placement import Exchange, Runtime, joined

# What to expect: how many numbers, and their dtype.
Size = tuple[int, torch.dtype]


def swap(
    runtime: Runtime,
    outgoing: Sequence[Sequence[Tensor]],
    expected: Sequence[Sequence[Size]],
    device: torch.device,
    ranks: Sequence[int] | None = None,
) -> list[list[Tensor]]:
    """Send tensors to each of some ranks and receive some from each.

    Args:
        runtime: Does it.
        outgoing: For each of `ranks` what it is sent, in order.
        expected: For each of them what it sends.
        device: Where all of them are.
        ranks: Those that take part, this one among them; None: all.

    Returns:
        The vectors that came from each.
    """
    under_way = Swap(runtime, expected, device, runtime.subgroup(range(runtime.ranks) if ranks is None else ranks))
    under_way.send(outgoing)
    return under_way.wait()


class Swap:
    """A message under way, as `swap` exchanges it.

    Attributes:
        sent: The bytes that it sends to all ranks, end to end; None: it has not left yet.
    """

    def __init__(
        self,
        runtime: Runtime,
        expected: Sequence[Sequence[Size]],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Expect vectors from the ranks of `group`, in whose queue the message stands."""
        sizes = [sum(numel * dtype.itemsize for numel, dtype in own) for own in expected]
        self.sent: Tensor | None = None
        self._device, self._expected = device, expected
        self._exchange = Exchange(runtime, sizes, device, group)

    def send(self, outgoing: Sequence[Sequence[Tensor]]) -> None:
        """Begin to send copies of what is outgoing to each rank."""
        self.sent, splits = joined([[_as_bytes(tensor) for tensor in own] for own in outgoing], self._device)
        self._exchange.send(self.sent, splits)

    def wait(self) -> list[list[Tensor]]:
        """Wait for the vectors from each rank of the group, and return them."""
        return [_read(message, own) for message, own in zip(self._exchange.wait(), self._expected, strict=True)]


def nbytes(tensors: Sequence[Tensor]) -> int:
    """Return how many bytes `tensors` are in a message."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _read(message: Tensor, sizes: Sequence[Size]) -> list[Tensor]:
    pieces = message.split([numel * dtype.itemsize for numel, dtype in sizes])
    # A view needs numbers that are aligned; behind narrower ones they may not be.
    return [
        (piece if piece.storage_offset() % dtype.itemsize == 0 else piece.clone()).view(dtype)
        for piece, (_, dtype) in zip(pieces, sizes, strict=True)
    ]
