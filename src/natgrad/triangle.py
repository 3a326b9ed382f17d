"""Symmetric matrices of which only the lower triangle is stored: rectangular panels of rows, end to end.

A panel holds some rows up to the column of the last, so that it is copied and computed with as a rectangle; what lies
above the diagonal in it is zero. At d = 1024 this takes 0.56 of the square; up to d = 128 it is one panel, the square.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

_ROWS = 128


def length(size: int) -> int:
    """Return the number of elements that a matrix ``[size, size]`` takes."""
    return sum((stop - start) * stop for start, stop in _panels(size))


def panels(packed: Tensor, matrices: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the panels of packed ``[N, length(d)]`` and of full matrices ``[N, d, d]`` side by side, as views."""
    offset = 0
    for start, stop in _panels(matrices.shape[-1]):
        end = offset + (stop - start) * stop
        yield packed[:, offset:end].unflatten(1, (stop - start, stop)), matrices[:, start:stop, :stop]
        offset = end


def clear_(matrices: Tensor) -> None:
    """Set to zero what lies above the diagonal of ``[N, d, d]`` within the panels."""
    for start, stop in _panels(matrices.shape[-1]):
        matrices[:, start:stop, start:stop].tril_()


def pack(matrices: Tensor) -> Tensor:
    """Return the panels ``[N, length(d)]`` of symmetric matrices ``[N, d, d]``."""
    packed = matrices.new_empty(len(matrices), length(matrices.shape[-1]))
    for panel, part in panels(packed, matrices):
        panel.copy_(part)
        panel[:, :, panel.shape[2] - panel.shape[1] :].tril_()
    return packed


def unpack(packed: Tensor, size: int) -> Tensor:
    """Return the symmetric matrices ``[N, size, size]`` of some panels."""
    matrices = packed.new_zeros(len(packed), size, size)
    for panel, part in panels(packed, matrices):
        part.copy_(panel)
    return matrices + matrices.tril(-1).mT


def _panels(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, _ROWS):
        yield start, min(start + _ROWS, size)
