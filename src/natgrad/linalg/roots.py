"""Inverse roots and polar factors of stacked matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from natgrad.linalg import eigh, product
from natgrad.linalg.precision import at_least_float32

# The coefficients a, b and c of each step ``X ← (a I + b S + c S²) X``, S = X Xᵀ. They bring singular values between
# 0.01 and 1 as near to 1 as so many polynomials of degree 5 can (Polar Express: Amsel et al. 2025, algorithm 1): three
# steps to between 0.73 and 1.27, four to between 0.99 and 1.01. Smaller ones are multiplied by 78 or 153.
_COEFFICIENTS = (
    (8.0934, -23.6205, 17.4462),
    (3.6366, -2.7219, 0.5365),
    (2.6613, -1.9772, 0.4526),
    (1.9562, -1.3375, 0.3839),
    (1.8750, -1.2500, 0.3750),
    (1.8750, -1.2500, 0.3750),
)
# The polynomials grow fast above 1, which rounding must not reach.
_MARGIN = 1.01
# Steps in a dtype narrower than float32 before S is computed anew: its small eigenvalues may be rounded to negative
# ones, which would grow.
_NARROW = 2
# The ratio of its sides from which the inverse square root of the smaller side takes fewer products than steps.
LONG = 1.5


def inverse_root(factors: Tensor, damping: float, power: float) -> tuple[Tensor, Tensor]:
    """Return ``(X / m + δ I)^-p`` with the mean eigenvalue m = tr X / d, and whether each succeeded ``[N]`` (bool).

    Factors are matrices ``[N, d, d]``, of which only the lower triangles are read, or diagonals ``[N, d]``. Zeros count
    as X / m = 0.
    """
    if factors.ndim == 2:
        return _damped_power(factors, damping, power), factors.sum(-1).isfinite()
    values, vectors, succeeded = eigh(factors)
    half = vectors * _damped_power(values, damping, power).sqrt()[:, None, :]
    return product(half, half.mT), succeeded


def _damped_power(values: Tensor, damping: float, power: float) -> Tensor:
    """Return ``(values / mean + δ)^-p`` for eigenvalues ``[N, d]``."""
    mean = values.mean(-1, keepdim=True)
    return (values / torch.where(mean > 0, mean, 1) + damping).pow_(-power)


def polar(matrices: Tensor) -> Tensor:
    """Return the polar factors U Vᵀ of matrices U Σ Vᵀ. Singular values below sqrt(ε) of the largest count as zero."""
    U, values, Vh = torch.linalg.svd(matrices, full_matrices=False)
    least = values[:, :1] * torch.finfo(values.dtype).eps ** 0.5
    return product(U * (values > least)[:, None, :], Vh)


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """Return approximate polar factors by at most 6 Newton-Schulz steps, which need products alone (Jordan 2024, Muon).

    Long matrices are multiplied by the product of all polynomials, which are polynomials of the small ``X Xᵀ`` alone
    (Gram Newton-Schulz, Dao-AILab 2026). Matrices of zeros stay zero. Cost, with d the smaller of o and i:
    N steps (2 o i + d²) d multiply-adds, or N (2 o i + d² (4 steps - 3)) d for long matrices, in narrow dtypes for
    every two steps.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    X = matrices.mT if tall else matrices
    dtype = at_least_float32(X.dtype)
    norm = torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True, dtype=dtype) * _MARGIN
    X = X * torch.where(norm > 0, norm, 1).reciprocal().to(X.dtype)
    at_once = 1 if X.shape[2] <= LONG * X.shape[1] else steps if X.dtype == dtype else _NARROW
    for first in range(0, steps, at_once):
        X = _steps(X, _COEFFICIENTS[first : min(first + at_once, steps)])
    return X.mT if tall else X


def _steps(X: Tensor, coefficients: Sequence[tuple[float, float, float]]) -> Tensor:
    """Return X after the steps with these coefficients."""
    S = torch.bmm(X, X.mT)
    (a, b, c), *others = coefficients
    Q = torch.baddbmm(S, S, S, beta=b, alpha=c)  # a step multiplies X by a I + Q
    if not others:
        return torch.baddbmm(X, Q, X, beta=a)
    P = Q.clone()
    P.diagonal(dim1=-2, dim2=-1).add_(a)
    for following in others:
        S = torch.baddbmm(S, Q, S, beta=a)
        S = torch.baddbmm(S, S, Q, beta=a)
        a, b, c = following
        Q = torch.baddbmm(S, S, S, beta=b, alpha=c)
        P = torch.baddbmm(P, Q, P, beta=a)
    return torch.bmm(P, X)
