"""The layouts of messages: even slices of a bucket with numbers of several owners, and numbers in a narrow dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from natgrad.linalg.precision import power_of_two

_NOTHING = slice(0, 0)
# A model's numbers are cut into so many messages, if it has as many layers: one travels while the next is computed.
LEAST_MESSAGES = 8
# The share of a bucket that one rank may send or receive twice.
_MOST_SURPLUS = 0.1
# Float16 values are scaled below 2¹⁵, so that rounding up cannot overflow.
_TOP = 15


@dataclass(frozen=True)
class Slices:
    """Even slices of a bucket, one for each of P ranks, where ranks may own different numbers of elements.

    Slice r begins with numbers that rank r owns. The surplus of ranks that own more than a slice fills the slices of
    others, in ascending order of owners and of ranks. Only the surplus is sent twice.

    Attributes:
        sizes: The number of elements that each rank owns.
        padded: Whether slices are as long as the most that a rank owns, so that there is no surplus.
    """

    sizes: tuple[int, ...]
    padded: bool = False

    @property
    def total(self) -> int:
        """The number of all elements, n."""
        return sum(self.sizes)

    @cached_property
    def length(self) -> int:
        """The length of a slice, ``ceil(n / P)``. Shorter slices are padded with zeros."""
        return max(self.sizes) if self.padded else -(-self.total // len(self.sizes))

    @cached_property
    def _runs(self) -> dict[tuple[int, int], tuple[slice, slice]]:
        """The positions of a run among the owner's numbers and in the slice of a rank, by owner and rank."""
        found: dict[tuple[int, int], tuple[slice, slice]] = {}
        rank, filled = 0, min(self.sizes[0], self.length)
        for owner, size in enumerate(self.sizes):
            start = self.length
            while start < size:
                if filled == self.length:
                    rank += 1
                    filled = min(self.sizes[rank], self.length)
                    continue
                count = min(size - start, self.length - filled)
                found[owner, rank] = slice(start, start + count), slice(filled, filled + count)
                start, filled = start + count, filled + count
        return found

    @property
    def is_even(self) -> bool:
        """Whether no rank owns more than a slice."""
        return not self._runs

    @property
    def is_nearly_even(self) -> bool:
        """Whether no rank sends or receives much of the bucket twice."""
        return max(self.sizes) - self.length <= _MOST_SURPLUS * self.total

    @property
    def pads_little(self) -> bool:
        """Whether slices as long as the most that a rank owns are not much longer together than the bucket."""
        return len(self.sizes) * max(self.sizes) <= (1 + _MOST_SURPLUS) * self.total

    def first(self, rank: int) -> slice:
        """Return the position of a rank's first numbers in its slice, and equally among all its numbers."""
        return slice(0, min(self.sizes[rank], self.length))

    def surplus(self, owner: int, rank: int) -> tuple[slice, slice]:
        """Return where the surplus of an owner in the slice of a rank stands: among its numbers, and in the slice."""
        return self._runs.get((owner, rank), (_NOTHING, _NOTHING))

    def sent(self, rank: int) -> int:
        """Return how many numbers a rank sends in `post_to_owners`, or receives in `post_from_owners`."""
        return self._even + self._leaving[rank]

    def received(self, rank: int) -> int:
        """Return how many numbers a rank receives in `post_to_owners`, or sends in `post_from_owners`."""
        return self._even + max(0, self.sizes[rank] - self.length)

    @property
    def _even(self) -> int:
        return (len(self.sizes) - 1) * self.length

    @cached_property
    def _leaving(self) -> list[int]:
        leaving = [0] * len(self.sizes)
        for (_, rank), (run, _) in self._runs.items():
            leaving[rank] += run.stop - run.start
        return leaving

    def cut(self, vectors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the slices ``[length]`` of the numbers of each owner."""
        owners: list[list[int]] = [[] for _ in self.sizes]
        for owner, rank in self._runs:
            owners[rank].append(owner)
        for rank, vector in enumerate(vectors):
            yield self.fill([vector[self.first(rank)], *(vectors[o][self.surplus(o, rank)[0]] for o in owners[rank])])

    def fill(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the concatenation of `parts`, padded with zeros to a slice ``[length]``."""
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return whole if len(whole) == self.length else pad(whole, (0, self.length - len(whole)))

    def join(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """Undo `cut`: return the numbers of each owner."""
        pieces = [[vector[self.first(rank)]] for rank, vector in enumerate(slices)]
        for (owner, rank), (_, place) in self._runs.items():
            pieces[owner].append(slices[rank][place])
        return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in pieces]


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """The format of a row: `wide` numbers of `dtype`, the scale of float16 values, then `narrow` numbers of `wire`.

    Before and after, all numbers have `dtype`. Narrow float16 numbers of a row are divided by a power of two.
    """

    wide: int = 0
    narrow: int
    dtype: torch.dtype
    wire: torch.dtype

    @property
    def lossless(self) -> bool:
        """Whether all numbers arrive exactly."""
        return self.wire == self.dtype

    @property
    def size(self) -> int:
        """The bytes of a row, padded to a multiple of 8, so that rows are aligned."""
        return -(-self.payload // 8) * 8

    @property
    def payload(self) -> int:
        """The bytes of a row without padding."""
        return self._offset + self.narrow * self.wire.itemsize

    def empty(self, rows: int, device: torch.device) -> Tensor:
        """Return an uninitialised message ``[rows, size]``."""
        return torch.empty(rows, self.size, dtype=torch.uint8, device=device)

    def write(self, message: Tensor, narrow: Tensor, wide: Tensor | None = None) -> None:
        """Fill a message ``[R, size]`` with `narrow` ``[R, narrow]`` and `wide` ``[R, wide]``."""
        if wide is not None:
            self._wide(message).copy_(wide)
        if self._scaled:
            scale = power_of_two(narrow, _TOP)[:, None]
            self._scale(message).copy_(scale)
            narrow = narrow / scale
        self._codes(message).copy_(narrow)

    def read(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[R, wide]`` and ``[R, narrow]`` of a message, in `dtype`; views of it if `wire` is `dtype`."""
        codes = self._codes(message).to(self.dtype)
        if self._scaled:
            codes *= self._scale(message).to(self.dtype)
        return self._wide(message), codes

    @property
    def _scaled(self) -> bool:
        return self.wire == torch.float16 and self.narrow > 0

    @property
    def _offset(self) -> int:
        return self.wide * self.dtype.itemsize + 4 * self._scaled

    def _wide(self, message: Tensor) -> Tensor:
        return message[:, : self.wide * self.dtype.itemsize].view(self.dtype)

    def _scale(self, message: Tensor) -> Tensor:
        return message[:, self.wide * self.dtype.itemsize : self._offset].view(torch.float32)

    def _codes(self, message: Tensor) -> Tensor:
        return message[:, self._offset : self._offset + self.narrow * self.wire.itemsize].view(self.wire)


def narrower(wire: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of `dtype` are sent: `wire` if it is narrower, otherwise `dtype`."""
    return wire if wire is not None and wire.itemsize < dtype.itemsize else dtype
