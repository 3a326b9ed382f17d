"""Tensors that several layers read in one forward pass, such as queries, keys and values."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from typing_extensions import override

from natgrad.layers.rows import MatrixRows, Rows


class Source:
    """A tensor that layers read in one forward pass. Its Gram matrix is computed once for all of them.

    Attributes:
        readers: The number of uses of layers that read it.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Start without readers; `tensor` is referred to weakly."""
        self.readers = 0
        self._tensor, self._version = weakref.ref(tensor), tensor._version
        self._gram: Tensor | None = None
        self._kind: object = None
        self._waiting = 0  # the readers that have not taken `_gram`

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether this is `tensor`, and its values have not changed."""
        return self._tensor() is tensor and self._version == tensor._version

    def shared(self, rows: Rows) -> Rows:
        """Return the rows of a reader, such that other readers use their Gram matrix too."""
        return _SharedRows(rows, self) if self.readers > 1 and isinstance(rows, MatrixRows) else rows

    def gram(self, rows: MatrixRows, like: Tensor) -> Tensor:
        """Return the Gram matrix of a reader's rows, shaped as `like` ``[1, d, d]``; its lower triangle counts.

        It is kept until every reader has taken it.
        """
        gram, kind = self._gram, (rows.matrix.shape, rows.bias, like.dtype)
        if gram is None or kind != self._kind:
            gram, self._kind, self._waiting = torch.zeros_like(like), kind, self.readers
            rows.add_gram_(gram)
        self._waiting -= 1
        self._gram = gram if self._waiting else None
        return gram


class _SharedRows(MatrixRows):
    """The rows of one of several layers that read the same tensor."""

    def __init__(self, rows: MatrixRows, source: Source) -> None:
        super().__init__(rows.matrix, rows.samples, bias=rows.bias)
        self._rows, self._source = rows, source

    @override
    def add_gram_(self, out: Tensor, *, scale: float = 1.0, overwrite: bool = False) -> None:
        if overwrite:
            self._rows.add_gram_(out, scale=scale, overwrite=overwrite)
        else:
            out.add_(self._source.gram(self._rows, out), alpha=scale)
