"""The packed lower triangle of symmetric matrices, a rectangle of d (d + 1) / 2 elements.

The left half of the columns is stored unchanged; the corner above its diagonal holds the triangle of the right half,
transposed (rectangular full packed format: Gustavson et al. 2010, ACM TOMS 37-2). Packing copies rectangles.
"""

from __future__ import annotations

import torch
from torch import Tensor


def length(size: int) -> int:
    """Return the number of elements that a matrix ``[size, size]`` takes."""
    return size * (size + 1) // 2


def pack(matrices: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the packed lower triangles ``[N, length(d)]`` of matrices ``[N, d, d]``, written to `out` if given."""
    size = matrices.shape[-1]
    packed = matrices.new_empty(len(matrices), length(size)) if out is None else out
    left, corner = _halves(packed, size)
    half = size - corner.shape[-1]
    left.copy_(matrices[:, :, :half])
    # `where`, because elements above the diagonal may be NaN.
    below = torch.ones(corner.shape[1:], dtype=torch.bool, device=packed.device).tril_(-1)
    corner.copy_(torch.where(below, corner, matrices[:, half:, half:].mT))
    return packed


def unpack(packed: Tensor, size: int) -> Tensor:
    """Return the symmetric matrices ``[N, size, size]`` from packed ones ``[N, length(size)]``."""
    matrices = packed.new_empty(len(packed), size, size)
    left, corner = _halves(packed, size)
    half = size - corner.shape[-1]
    matrices[:, :, :half].copy_(left)
    matrices[:, half:, half:].copy_(corner.mT)
    return mirror_(matrices)


def mirror_(matrices: Tensor) -> Tensor:
    """Copy the lower triangles of matrices ``[..., d, d]`` to the upper ones, in place."""
    return matrices.tril_().add_(matrices.tril(-1).mT)


def diagonals(packed: Tensor, size: int) -> Tensor:
    """Return the diagonals ``[N, size]``, in a permuted order."""
    return torch.cat([half.diagonal(dim1=1, dim2=2) for half in _halves(packed, size)], 1)


def _halves(packed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return views of the left columns ``[N, size, size - n]``, and of the corner ``[N, n, n]`` above them."""
    n = size // 2
    rectangle = packed.unflatten(1, (-1, size - n))
    if size % 2:
        return rectangle, rectangle[:, :n, 1:]
    return rectangle[:, 1:], rectangle[:, :n]
