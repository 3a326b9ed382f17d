"""Inverse roots and polar factors of stacked matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.linalg import eigh, product
from natgrad.linalg.precision import at_least_float32

# A step with these coefficients multiplies small singular values by 3.4; four bring those between 0.007 and 1 to
# between 0.7 and 1.2 (Jordan 2024).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# The ratio of its sides from which the inverse square root of the smaller side takes fewer products than steps.
LONG = 1.5


def inverse_root(matrices: Tensor, damping: float, power: float) -> tuple[Tensor, Tensor]:
    """Return ``(X / m + δ I)^-p`` with the mean eigenvalue m = tr X / d, and whether each succeeded ``[N]`` (bool).

    Only the lower triangles of X are read. A matrix of zeros counts as X / m = 0.
    """
    values, vectors, succeeded = eigh(matrices)
    mean = values.mean(-1, keepdim=True)
    roots = (values / torch.where(mean > 0, mean, 1) + damping).pow_(-power)
    half = vectors * roots.sqrt()[:, None, :]
    return product(half, half.mT), succeeded


def polar(matrices: Tensor) -> Tensor:
    """Return the polar factors U Vᵀ of matrices U Σ Vᵀ. Singular values below sqrt(ε) of the largest count as zero."""
    U, values, Vh = torch.linalg.svd(matrices, full_matrices=False)
    least = values[:, :1] * torch.finfo(values.dtype).eps ** 0.5
    return product(U * (values > least)[:, None, :], Vh)


def inverse_square_root(squares: Tensor, steps: int) -> Tensor:
    """Return approximate inverse square roots of S = X Xᵀ, up to a factor: P with P X near the polar factor of X.

    The Newton-Schulz iteration of Muon, ``X ← (a I + b X Xᵀ + c (X Xᵀ)²) X``, multiplies X by a polynomial of S alone.
    This is the product of these polynomials. Singular values of X end between 0.7 and 1.2 of their mean, which is as
    good for training as 1 (Jordan 2024, Muon). S is in at least float32; zeros give a multiple of the identity. Cost:
    N d³ (4 steps - 3) multiply-adds.
    """
    a, b, c = _COEFFICIENTS
    trace = squares.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    S = squares / torch.where(trace > 0, trace, 1)
    Q = torch.baddbmm(S, S, S, beta=b, alpha=c)  # a step multiplies by a I + Q
    P = Q.clone()
    P.diagonal(dim1=-2, dim2=-1).add_(a)
    for _ in range(steps - 1):
        S = torch.baddbmm(S, Q, S, beta=a)
        S = torch.baddbmm(S, S, Q, beta=a)
        Q = torch.baddbmm(S, S, S, beta=b, alpha=c)
        P = torch.baddbmm(P, Q, P, beta=a)
    return P


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """Return approximate polar factors, up to a factor, by the Newton-Schulz iteration of Muon.

    Long matrices are multiplied by `inverse_square_root`, which takes fewer products. In narrower dtypes than float32
    that form would diverge, because the small eigenvalues of a rounded ``X Xᵀ`` may be negative, and grow. Matrices of
    zeros stay zero. Cost, with d the smaller of o and i: N steps (2 o i + d²) d multiply-adds, or
    N (2 o i + d² (4 steps - 3)) d for long matrices.
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    X = matrices.mT if tall else matrices
    dtype = at_least_float32(X.dtype)
    if X.dtype == dtype and X.shape[2] > LONG * X.shape[1]:
        X = torch.bmm(inverse_square_root(torch.bmm(X, X.mT), steps), X)
        return X.mT if tall else X
    norm = torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True, dtype=dtype)
    X = X * torch.where(norm > 0, norm, 1).reciprocal().to(X.dtype)
    for _ in range(steps):
        S = torch.bmm(X, X.mT)
        X = torch.baddbmm(X, torch.baddbmm(S, S, S, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X
