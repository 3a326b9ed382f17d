"""Symmetric matrices of which only the lower triangle is stored, as a rectangle of d (d + 1) / 2 elements.

The left half of the columns is stored as it is; its upper corner, above the diagonal, holds the triangle of the right
half, transposed (rectangular full packed format: Gustavson et al. 2010, ACM TOMS 37-2). So rectangles are copied, never
indices, and sums of packed matrices are packed sums.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_INDEXED = 724  # the most columns of matrices whose places are kept: a MiB


def length(size: int) -> int:
    """Return the number of elements that a matrix ``[size, size]`` takes."""
    return size * (size + 1) // 2


def pack(matrices: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the lower triangles of matrices ``[N, d, d]``, packed ``[N, length(d)]``; anything may lie above them.

    Args:
        matrices: The matrices.
        out: Where to write, if not into new memory.
    """
    size = matrices.shape[-1]
    packed = matrices.new_empty(len(matrices), length(size)) if out is None else out
    if matrices.device.type == "cuda" and size <= _INDEXED and matrices[:1].is_contiguous():
        # One call, not five: there it is calls that take the time.
        return torch.index_select(matrices.flatten(1), 1, _places(size, matrices.device), out=packed)
    left, corner = _halves(packed, size)
    half = size - corner.shape[-1]
    left.copy_(matrices[:, :, :half])
    # By a choice, not a product or a sum: what lies above a diagonal may be no number.
    below = torch.ones(corner.shape[1:], dtype=torch.bool, device=packed.device).tril_(-1)
    corner.copy_(torch.where(below, corner, matrices[:, half:, half:].mT))
    return packed


@cache
def _places(size: int, device: torch.device) -> Tensor:
    """Return where in a matrix ``[size, size]`` each element of a packed one is."""
    with _disable_current_modes():
        places = pack(torch.arange(size * size, dtype=torch.int32, device="cpu").view(1, size, size))[0]
        return places.to(device, non_blocking=True)


def unpack(packed: Tensor, size: int) -> Tensor:
    """Return the symmetric matrices ``[N, size, size]`` of packed ones ``[N, length(size)]``."""
    matrices = packed.new_empty(len(packed), size, size)
    left, corner = _halves(packed, size)
    half = size - corner.shape[-1]
    matrices[:, :, :half].copy_(left)
    matrices[:, half:, half:].copy_(corner.mT)
    return mirror_(matrices)


def mirror_(matrices: Tensor) -> Tensor:
    """Copy the lower triangles of matrices ``[..., d, d]`` to the upper ones, in place."""
    half = matrices.shape[-1] // 2
    matrices[..., :half, half:].copy_(matrices[..., half:, :half].mT)
    for square in (matrices[..., :half, :half], matrices[..., half:, half:]):  # half the work of mirroring all of it
        square.tril_().add_(square.tril(-1).mT)
    return matrices


def diagonals(packed: Tensor, size: int) -> Tensor:
    """Return the diagonals ``[N, size]``, in an order of their own."""
    return torch.cat([half.diagonal(dim1=1, dim2=2) for half in _halves(packed, size)], 1)


def _halves(packed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return views of the left columns ``[N, size, size - n]``, and of the corner ``[N, n, n]`` over them."""
    n = size // 2
    rectangle = packed.unflatten(1, (-1, size - n))
    if size % 2:
        return rectangle, rectangle[:, :n, 1:]
    return rectangle[:, 1:], rectangle[:, :n]
