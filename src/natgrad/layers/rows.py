"""Rows of inputs and output gradients of one use of a layer, built only on demand.

Shapes: n blocks (groups of a convolution), B samples, T positions, d columns.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from natgrad.layers import gram
from natgrad.linalg.device import known_all
from natgrad.linalg.precision import at_least_float32

_PIECE = 1 << 20
"""Elements to square at a time."""


class Rows(ABC):
    """Rows ``[n, B, T, d]`` of inputs or of output gradients.

    Attributes:
        samples: B.
        positions: T.
        one_hot: Whether a row is one-hot, or a mean of one-hot rows.
    """

    samples: int
    positions: int
    one_hot: bool = False

    @abstractmethod
    def add_gram_(self, out: Tensor, *, scale: float = 1.0) -> None:
        """Add `scale` Σ_b Σ_t x xᵀ to the lower triangle of `out` ``[n, d, d]``."""

    def add_channel_gram_(self, out: Tensor, *, scale: float = 1.0) -> None:
        """Add `scale` Σ_b Σ_t Σ_k x_k x_kᵀ to the lower triangle of `out` ``[n, c, c]``.

        A row holds k elements for each of c channels, those of a channel one after the other (a convolution's patch
        with k kernel offsets); x_k are its k-th elements.
        """
        rows = self.dense().unflatten(-1, (out.shape[-1], -1)).mT  # [n, B, T, k, c]
        gram.add_row_gram_(out, rows.flatten(1, 3), scale=scale)

    def squares(self) -> Tensor:
        """Return Σ_b Σ_t x∘x ``[n, d]``, the diagonal of the Gram matrix, in at least float32."""
        return sum_squares(self.dense().flatten(1, 2).transpose(0, 1), 0)

    @abstractmethod
    def pool(self) -> Tensor:
        """Return the sum over positions ``[n, B, d]``, in at least float32."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the rows themselves ``[n, B, T, d]``, a view where possible."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(samples={self.samples}, positions={self.positions})"

    def part(self, start: int, stop: int) -> Rows:
        """Return the rows of the samples `start` to `stop`."""
        return DenseRows(self.dense()[:, start:stop], one_hot=self.one_hot)

    def outer(self, gradients: Tensor) -> Tensor:
        """Return Σ_t g xᵀ of each sample ``[n, B, o, d]``, for ``gradients [n, B, T, o]`` in at least float32."""
        return gradients.mT @ self.dense().to(gradients.dtype)

    def masked(self, mask: Tensor) -> Rows:
        """Return these rows with those set to zero where `mask` ``[B, T]`` is false."""
        return DenseRows(self.dense() * mask[:, :, None])

    def nonzero(self) -> Tensor:
        """Return which positions ``[B, T]`` have a nonzero row (bool)."""
        rows = self.dense()
        if rows.shape[-1]:
            first = rows[..., 0].ne(0).any(0)  # usually one column suffices
            if known_all(first):
                return first
        # A maximum is faster than a comparison of all elements, and does not underflow as a norm would.
        return rows.abs().amax(-1).amax(0).ne(0)


class DenseRows(Rows):
    """Rows stored as one tensor ``[n, B, T, d]``."""

    def __init__(self, values: Tensor, *, one_hot: bool = False) -> None:
        self.values, self.one_hot = values, one_hot
        self.samples, self.positions = values.shape[1], values.shape[2]

    @override
    def add_gram_(self, out: Tensor, *, scale: float = 1.0) -> None:
        gram.add_row_gram_(out, self.values.flatten(1, 2), scale=scale)

    @override
    def pool(self) -> Tensor:
        return sum_up(self.values, 2)

    @override
    def dense(self) -> Tensor:
        return self.values


class SharedInput:
    """A tensor that several layers read in one forward pass; their Gram matrix is computed once.

    Attributes:
        readers: The number of uses of layers that read it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.readers = 0
        self._tensor, self._version = weakref.ref(tensor), tensor._version
        self._gram: Tensor | None = None
        self._kind: object = None
        self._waiting = 0  # the readers that have not taken `_gram`

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether this is `tensor`, and its values have not changed."""
        return self._tensor() is tensor and self._version == tensor._version

    def gram(self, rows: MatrixRows, like: Tensor) -> Tensor:
        """Return the Gram matrix of a reader's rows ``[1, d, d]``; it is kept until every reader has taken it."""
        gram, kind = self._gram, (rows.matrix.shape, rows.bias, like.dtype)
        if gram is None or kind != self._kind:
            gram, self._kind, self._waiting = torch.zeros_like(like), kind, self.readers
            rows.add_unshared_gram_(gram)
        self._waiting -= 1
        self._gram = gram if self._waiting else None
        return gram


class MatrixRows(Rows):
    """Rows of one block, features last: ``matrix [B T, d]``, with an implicit trailing 1 if `bias`.

    Attributes:
        source: The tensor that they are of, if several layers read it; they share its Gram matrix.
    """

    source: SharedInput | None = None

    def __init__(self, matrix: Tensor, samples: int, *, bias: bool = False) -> None:
        self.matrix, self.bias = matrix, bias
        self.samples, self.positions = samples, matrix.shape[0] // max(1, samples)

    @override
    def add_gram_(self, out: Tensor, *, scale: float = 1.0) -> None:
        if self.source is not None and self.source.readers > 1:
            out.add_(self.source.gram(self, out), alpha=scale)
        else:
            self.add_unshared_gram_(out, scale=scale)

    def add_unshared_gram_(self, out: Tensor, *, scale: float = 1.0) -> None:
        """Add the Gram matrix, which other readers of the input do not use."""
        gram.add_row_gram_(out[0], self.matrix, scale=scale, bias=self.bias)

    @override
    def squares(self) -> Tensor:
        squares = sum_squares(self.matrix, 0)
        return with_constant(squares, len(self.matrix))[None] if self.bias else squares[None]

    @override
    def part(self, start: int, stop: int) -> Rows:
        rows = self.matrix[start * self.positions : stop * self.positions]
        return MatrixRows(rows, stop - start, bias=self.bias)

    @override
    def pool(self) -> Tensor:
        pooled = sum_up(self.matrix.view(self.samples, self.positions, -1), 1)
        return with_constant(pooled, self.positions)[None] if self.bias else pooled[None]

    @override
    def dense(self) -> Tensor:
        matrix = with_constant(self.matrix, 1) if self.bias else self.matrix
        return matrix.view(1, self.samples, self.positions, -1)


class ChannelRows(Rows):
    """Rows of n blocks, channels second: ``maps [B, n d, *spatial]``."""

    def __init__(self, maps: Tensor, blocks: int) -> None:
        self.maps, self.blocks = maps, blocks
        self.samples, self.positions = maps.shape[0], maps.shape[2:].numel()

    @override
    def add_gram_(self, out: Tensor, *, scale: float = 1.0) -> None:
        gram.add_channel_gram_(out, self.maps, scale=scale)

    @override
    def squares(self) -> Tensor:
        return sum_squares(self.maps, (0, *range(2, self.maps.ndim))).view(self.blocks, -1)

    @override
    def part(self, start: int, stop: int) -> Rows:
        return ChannelRows(self.maps[start:stop], self.blocks)

    @override
    def pool(self) -> Tensor:
        return sum_up(self.dense(), 2)

    @override
    def dense(self) -> Tensor:
        rows: Tensor = self.maps.flatten(2).unflatten(1, (self.blocks, -1)).permute(1, 0, 3, 2)
        return rows


class CoefficientRows(Rows):
    """Rows ``[1, B, T, i C]`` of an elementwise layer: the gradients of its coefficients at each position."""

    def __init__(self, *columns: Tensor | None) -> None:
        """Wrap the i columns ``[1, B, T, C]``, which are joined when they are pooled."""
        self.columns = [column for column in columns if column is not None]
        self.samples, self.positions = self.columns[0].shape[1:3]

    @override
    def add_gram_(self, out: Tensor, *, scale: float = 1.0) -> None:
        DenseRows(self.dense()).add_gram_(out, scale=scale)

    @override
    def pool(self) -> Tensor:
        return torch.cat([sum_up(column, 2) for column in self.columns], -1)

    @override
    def dense(self) -> Tensor:
        return torch.cat(self.columns, -1)


class _Regrouped(Rows):
    """The same rows in the same order, with another number of samples."""

    def __init__(self, rows: Rows, samples: int) -> None:
        self.rows, self.samples = rows, samples
        self.positions = rows.samples * rows.positions // samples
        self.one_hot = rows.one_hot

    def add_gram_(self, out: Tensor, *, scale: float = 1.0) -> None:
        self.rows.add_gram_(out, scale=scale)

    def add_channel_gram_(self, out: Tensor, *, scale: float = 1.0) -> None:
        self.rows.add_channel_gram_(out, scale=scale)

    def squares(self) -> Tensor:
        return self.rows.squares()

    def part(self, start: int, stop: int) -> Rows:
        start, stop, size = start * self.positions, stop * self.positions, self.rows.positions
        first, last = start // size, -(-stop // size)
        taken = self.rows.part(first, last).dense().flatten(1, 2)[:, start - first * size : stop - first * size]
        return DenseRows(taken.unflatten(1, (-1, self.positions)), one_hot=self.one_hot)

    def pool(self) -> Tensor:
        if self.rows.samples < self.samples:
            return sum_up(self.dense(), 2)
        pooled: Tensor = self.rows.pool().unflatten(1, (self.samples, -1)).sum(2)
        return pooled

    def dense(self) -> Tensor:
        rows: Tensor = self.rows.dense().flatten(1, 2).unflatten(1, (self.samples, -1))
        return rows


def by_sample(rows: Rows, samples: int) -> Rows:
    """Return the same rows, which are ordered by sample, regrouped into `samples` samples.

    A module may get windows of each sample as a longer batch. If each position is a sample, its maps hold several.
    """
    return rows if rows.samples == samples else _Regrouped(rows, samples)


def with_constant(rows: Tensor, value: float) -> Tensor:
    """Append a column with `value`: the homogeneous coordinate."""
    return torch.cat([rows, rows.new_full((*rows.shape[:-1], 1), value)], -1)


def sum_up(rows: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Return the sum over `dims` in at least float32."""
    return rows.sum(dims, dtype=at_least_float32(rows.dtype))


def sum_squares(rows: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Return the sum of squares over `dims`, which include the first, in at least float32; in pieces to save memory."""
    parts = rows.tensor_split(max(1, min(len(rows), rows.numel() // _PIECE)))
    dtype = at_least_float32(rows.dtype)
    return torch.stack([part.to(dtype).square().sum(dims) for part in parts]).sum(0)
