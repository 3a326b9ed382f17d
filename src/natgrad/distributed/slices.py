"""Cut a bucket with numbers of several owners into even slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

_NOTHING = slice(0, 0)


@dataclass(frozen=True)
class Slices:
    """Even slices of a bucket, one for each of P ranks, where ranks may own different numbers of elements.

    Slice r begins with numbers that rank r owns. The surplus of ranks that own more than a slice fills the slices of
    others, in ascending order of owners and of ranks. Only the surplus is sent twice.

    Attributes:
        sizes: The number of elements that each rank owns.
    """

    sizes: tuple[int, ...]

    @cached_property
    def length(self) -> int:
        """The length of a slice, ``ceil(n / P)``. Shorter slices are padded with zeros."""
        return -(-sum(self.sizes) // len(self.sizes))

    @cached_property
    def _surplus(self) -> dict[tuple[int, int], tuple[slice, slice]]:
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
        return not self._surplus

    def first(self, rank: int) -> slice:
        """Return the position of a rank's first numbers in its slice, and equally among all its numbers."""
        return slice(0, min(self.sizes[rank], self.length))

    def of_owner(self, owner: int, rank: int) -> slice:
        """Return the position of a surplus among its owner's numbers, for the part in the slice of another rank."""
        return self._run(owner, rank)[0]

    def in_slice(self, owner: int, rank: int) -> slice:
        """Return the position of an owner's surplus in the slice of another rank."""
        return self._run(owner, rank)[1]

    def _run(self, owner: int, rank: int) -> tuple[slice, slice]:
        return self._surplus.get((owner, rank), (_NOTHING, _NOTHING))

    def sent(self, rank: int) -> int:
        """Return how many numbers a rank sends in ``reduce_to_owners``, or receives in ``share_from_owners``."""
        return self._even + self._leaving[rank]

    def received(self, rank: int) -> int:
        """Return how many numbers a rank receives in ``reduce_to_owners``, or sends in ``share_from_owners``."""
        return self._even + max(0, self.sizes[rank] - self.length)

    @property
    def _even(self) -> int:
        return (len(self.sizes) - 1) * self.length

    @cached_property
    def _leaving(self) -> list[int]:
        leaving = [0] * len(self.sizes)
        for (_, rank), (run, _) in self._surplus.items():
            leaving[rank] += run.stop - run.start
        return leaving

    def cut(self, vectors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the slices ``[length]``.

        Args:
            vectors: The numbers of each owner.
        """
        owners: list[list[int]] = [[] for _ in self.sizes]
        for owner, rank in self._surplus:
            owners[rank].append(owner)
        for rank, vector in enumerate(vectors):
            yield self.fill([vector[self.first(rank)], *(vectors[o][self.of_owner(o, rank)] for o in owners[rank])])

    def fill(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the concatenation of `parts`, padded with zeros to a slice ``[length]``."""
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return whole if len(whole) == self.length else pad(whole, (0, self.length - len(whole)))

    def join(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """Undo `cut`: return the numbers of each owner."""
        pieces = [[vector[self.first(rank)]] for rank, vector in enumerate(slices)]
        for (owner, rank), (_, place) in self._surplus.items():
            pieces[owner].append(slices[rank][place])
        return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in pieces]
