"""LAPACK's decompositions of batches of matrices, padded to sizes that are fast on a CPU.

If columns start a multiple of 1024 bytes apart, as in matrices of 256, 512 or 1024 columns, the elements of a row
compete for a few cache lines. Padding these matrices by a few rows and columns reduces the time of `eigh` on one core
of an EPYC to 0.89, 0.86, 0.78 and 0.85 at 256, 512, 1024 and 2048 columns of float32, and that of a Cholesky inverse to
0.77, 0.67, 0.57 and 0.62. Padding odd sizes, so that columns are aligned to vector registers, reduces the time of
`eigh` to 0.97, 0.93 and 0.87 at 513, 769 and 1025 columns. Other sizes only save a transpose (0.95 to 1 of the time):
the upper triangle in LAPACK's column-major order is the lower one in torch's.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor
from torch.nn import functional

from natgrad.linalg import cusolver
from natgrad.linalg.device import on_host

# Columns collide in caches if their distance in bytes is a multiple of _COLLIDE; _APART more bytes avoid it.
_COLLIDE, _APART = 1024, 32
_ALIGNED = 480  # `eigh` pads matrices of at least this many columns to a multiple of _APART bytes


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigendecomposition of symmetric matrices, as ``torch.linalg.eigh``.

    Args:
        matrices: ``[N, d, d]``; only the lower triangles are read. Matrices that are not positive semi-definite may be
            decomposed twice.

    Returns:
        Eigenvalues ``[N, d]``, ascending, and eigenvectors ``[N, d, d]`` in columns, with any strides.

    Raises:
        torch.linalg.LinAlgError: if one does not converge.
    """
    if not on_host(matrices):
        return cusolver.eigh(matrices) or tuple(torch.linalg.eigh(matrices))
    size, more = matrices.shape[-1], _more(matrices, _ALIGNED)
    if more:
        # The padding's eigenvalue, on the diagonal, is below all others. It comes first and is cut off.
        trace = matrices.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
        least = torch.where(trace > 0, -trace, -1)
        padded = _padded(matrices, more, least).mT
        values, vectors = torch.linalg.eigh(padded, UPLO="U", out=(padded.new_empty(padded.shape[:-1]), padded))
        if not bool((values[:, more] <= least[:, 0] / 2).any()):
            return values[:, more:].contiguous(), vectors[:, :size, more:]
    values, vectors = torch.linalg.eigh(matrices.mT, UPLO="U")
    return values, vectors


def cholesky(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return Cholesky factors, as ``torch.linalg.cholesky_ex``, but padded by rows of the identity.

    Args:
        matrices: Symmetric ``[N, d, d]``; only the lower triangles are read.

    Returns:
        Lower factors ``[N, d + p, d + p]`` of the matrices padded by p >= 0 rows and columns of the identity, and
        LAPACK's info ``[N]``, 0 for success. Inverses from these factors have the same padding.
    """
    if not on_host(matrices):
        return tuple(torch.linalg.cholesky_ex(matrices))
    more = _more(matrices)
    copies = _padded(matrices, more, 1.0) if more else matrices.clone(memory_format=torch.contiguous_format)
    columns = copies.mT  # column-major, or torch would make another copy
    report = torch.empty(len(matrices), dtype=torch.int32, device=matrices.device)
    torch.linalg.cholesky_ex(columns, upper=True, out=(columns, report))
    return copies, report


def invert_by_(factors: Tensor) -> Tensor:
    """Return the inverses for lower factors from `cholesky`; on a CPU they overwrite the factors."""
    if not on_host(factors):
        # Half the time of `torch.cholesky_inverse` on an H100.
        unit = torch.eye(factors.shape[-1], dtype=factors.dtype, device=factors.device).expand_as(factors)
        halves = torch.linalg.solve_triangular(factors, unit, upper=False)
        return symmetric(halves.mT @ halves)
    return torch.cholesky_inverse(factors.mT, upper=True, out=factors.mT)


def symmetric(matrices: Tensor) -> Tensor:
    """Return the symmetric matrices ``[N, d, d]`` with these lower triangles, as a new tensor."""
    lower = matrices.new_ones(matrices.shape[-2:], dtype=torch.bool).tril_()
    return torch.where(lower, matrices, matrices.mT)


def collide(columns: int, dtype: torch.dtype) -> bool:
    """Return whether the elements of a row of matrices with `columns` columns compete for a few cache lines."""
    return columns * dtype.itemsize % _COLLIDE == 0


def _more(matrices: Tensor, aligned: float = inf) -> int:
    """Return the number of padding columns; from `aligned` columns on, columns become aligned to vectors."""
    size, step = matrices.shape[-1], _APART // matrices.dtype.itemsize
    if not matrices.numel():
        return 0
    more = -size % step if size >= aligned else 0
    return more + step if collide(size + more, matrices.dtype) else more


def _padded(matrices: Tensor, more: int, diagonal: Tensor | float) -> Tensor:
    """Return matrices padded by `more` rows and columns of zeros, with `diagonal` ``[N, 1]`` on their diagonal."""
    padded = functional.pad(matrices, (0, more, 0, more))
    padded.diagonal(dim1=-2, dim2=-1)[:, matrices.shape[-1] :] = diagonal
    return padded
