"""What one use of a layer shows its curvature: rows, never built unless somebody asks.

Shapes: n blocks (groups of a convolution), B samples, T positions, d columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from natgrad import gram


class Rows(ABC):
    """Rows ``[n, B, T, d]`` of inputs or of output gradients.

    Attributes:
        samples: B.
        positions: T.
    """

    samples: int
    positions: int

    @abstractmethod
    def add_gram_(self, out: Tensor, *, scale: float = 1.0, overwrite: bool = False) -> None:
        """Add `scale` Σ_b Σ_t x xᵀ to the lower triangle of `out` ``[n, d, d]`` (or write it when `overwrite`)."""

    @abstractmethod
    def pool(self) -> Tensor:
        """Return the sum over positions ``[n, B, d]``, in at least float32."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the rows themselves ``[n, B, T, d]``, a view where possible."""

    def masked(self, mask: Tensor) -> Rows:
        """Return these rows with those set to zero where `mask` ``[B, T]`` is false."""
        return DenseRows(self.dense() * mask[:, :, None])

    def nonzero(self) -> Tensor:
        """Return which positions ``[B, T]`` hold anything but zeros."""
        # A maximum is several times cheaper than comparing first, and keeps what a norm would let underflow.
        return self.dense().abs().amax(-1).amax(0).ne(0)


class DenseRows(Rows):
    """Rows that exist as one tensor ``[n, B, T, d]``."""

    def __init__(self, values: Tensor) -> None:
        """Wrap `values`."""
        self.values = values
        self.samples, self.positions = values.shape[1], values.shape[2]

    def add_gram_(self, out: Tensor, *, scale: float = 1.0, overwrite: bool = False) -> None:
        """See `Rows.add_gram_`."""
        gram.add_row_gram_(out, self.values.flatten(1, 2), scale=scale, overwrite=overwrite)

    def pool(self) -> Tensor:
        """See `Rows.pool`."""
        return sum_up(self.values, 2)

    def dense(self) -> Tensor:
        """See `Rows.dense`."""
        return self.values


class MatrixRows(Rows):
    """Rows of one block, features last: ``matrix [B T, d]``, with a trailing 1 that is never stored when `bias`."""

    def __init__(self, matrix: Tensor, samples: int, *, bias: bool = False) -> None:
        """Wrap `matrix`, whose rows are ordered by sample."""
        self.matrix, self.bias = matrix, bias
        self.samples, self.positions = samples, matrix.shape[0] // max(1, samples)

    def add_gram_(self, out: Tensor, *, scale: float = 1.0, overwrite: bool = False) -> None:
        """See `Rows.add_gram_`."""
        gram.add_row_gram_(out[0], self.matrix, scale=scale, bias=self.bias, overwrite=overwrite)

    def pool(self) -> Tensor:
        """See `Rows.pool`."""
        pooled = sum_up(self.matrix.view(self.samples, self.positions, -1), 1)
        return with_constant(pooled, self.positions)[None] if self.bias else pooled[None]

    def dense(self) -> Tensor:
        """See `Rows.dense`."""
        matrix = with_constant(self.matrix, 1) if self.bias else self.matrix
        return matrix.view(1, self.samples, self.positions, -1)


class ChannelRows(Rows):
    """Rows of n blocks, channels second: ``maps [B, n d, *spatial]``."""

    def __init__(self, maps: Tensor, blocks: int) -> None:
        """Wrap `maps`."""
        self.maps, self.blocks = maps, blocks
        self.samples, self.positions = maps.shape[0], maps.shape[2:].numel()

    def add_gram_(self, out: Tensor, *, scale: float = 1.0, overwrite: bool = False) -> None:
        """See `Rows.add_gram_`."""
        gram.add_channel_gram_(out, self.maps, scale=scale, overwrite=overwrite)

    def pool(self) -> Tensor:
        """See `Rows.pool`."""
        return sum_up(self.dense(), 2)

    def dense(self) -> Tensor:
        """See `Rows.dense`."""
        rows: Tensor = self.maps.flatten(2).unflatten(1, (self.blocks, -1)).permute(1, 0, 3, 2)
        return rows


def with_constant(rows: Tensor, value: float) -> Tensor:
    """Append a column that holds `value`: the homogeneous coordinate."""
    return torch.cat([rows, rows.new_full((*rows.shape[:-1], 1), value)], -1)


def sum_up(rows: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Return the sum over `dims` in at least float32: a half overflows, or rounds a count of positions."""
    return rows.sum(dims, dtype=torch.promote_types(rows.dtype, torch.float32))
