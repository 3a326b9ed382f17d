"""Inverse roots and polar factors of stacked matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from natgrad.linalg import eigh, product, symmetric
from natgrad.linalg.device import on_host
from natgrad.linalg.precision import at_least_float32, least_norm

# The coefficients a, b and c of each step ``X ← (a I + b S + c S²) X``, S = X Xᵀ. They bring singular values between
# 0.01 and 1.01 as near to 1 as so many polynomials of degree 5 can (Polar Express: Amsel et al. 2025, algorithm 1):
# three steps to between 0.73 and 1.27, four to between 0.99 and 1.01. Smaller ones are multiplied by 77 or 151. The
# polynomials grow fast beyond: rounding must not bring values of 1 there.
_COEFFICIENTS = (
    (8.0934 / 1.01, -23.6205 / 1.01**3, 17.4462 / 1.01**5),
    (3.6366, -2.7219, 0.5365),
    (2.6613, -1.9772, 0.4526),
    (1.9562, -1.3375, 0.3839),
    (1.8750, -1.2500, 0.3750),
    (1.8750, -1.2500, 0.3750),
)
# The same for singular values between 0.001 and 1.01, until they are 1.
_FROM_1000TH = (
    (8.4703 / 1.01, -25.1081 / 1.01**3, 18.6293 / 1.01**5),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
    (1.8887, -1.2652, 0.3765),
    (1.8750, -1.2500, 0.3750),
)
# The largest element of an inverse root's power times its matrix, less I, at which it is not exact enough.
_LARGEST_ERROR = 0.05
# Steps in a dtype narrower than float32 before S is computed anew: its small eigenvalues may be rounded to negative
# ones, which would grow.
_STEPS_PER_GRAM = 2
# The multiply-adds of X Xᵀ from which the product of all polynomials is faster than one step after the other. Below,
# most of the time is that of calls, of which it takes twice as many.
_GRAM_WORK = 2**19
# The ratio of its sides from which the inverse square root of the smaller side takes fewer products than steps.
LONG = 1.5


def inverse_root(factors: Tensor, damping: float, power: float) -> tuple[Tensor, Tensor]:
    """Return ``(X / m + δ I)^-p`` with the mean eigenvalue m = tr X / d, and whether each succeeded ``[N]`` (bool).

    Factors are matrices ``[N, d, d]``, of which only the lower triangles are read, or diagonals ``[N, d]``. Zeros count
    as X / m = 0. On accelerators, which multiply fast and decompose slowly, square and fourth roots are computed by
    products (`root_by_products`), and by a decomposition where these do not converge.
    """
    if factors.ndim == 2:
        return _damped_power(factors, damping, power), factors.sum(-1).isfinite()
    if on_host(factors) or factors.dtype != torch.float32 or power not in (0.5, 0.25):
        return _root_by_eigh(factors, damping, power)
    roots, succeeded = root_by_products(factors, damping, power)
    failed = (~succeeded).nonzero().flatten()
    if len(failed):
        roots[failed], succeeded[failed] = _root_by_eigh(factors[failed], damping, power)
    return roots, succeeded


def _root_by_eigh(factors: Tensor, damping: float, power: float) -> tuple[Tensor, Tensor]:
    """Compute `inverse_root` of matrices by eigendecompositions."""
    values, vectors, succeeded = eigh(factors)
    half = vectors * _damped_power(values, damping, power / 2)[:, None, :]
    return product(half, half.mT), succeeded


def root_by_products(factors: Tensor, damping: float, power: float) -> tuple[Tensor, Tensor]:
    """Compute `inverse_root` of matrices in float32, for the powers 1/2 and 1/4, by batched products alone.

    The Newton-Schulz iteration that brings X to its polar factor also yields, coupled, ``S^(1/2)`` and ``S^(-1/2)``
    (Higham 2008, Functions of Matrices, eq. 6.35); from the first of them the fourth root. Condition numbers up to
    1e6 converge, which a damping of 1e-6 d allows. Cost: 28 products of d x d matrices for 1/2, 51 for 1/4.
    """
    X = symmetric(factors)
    diagonal = X.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1)
    X /= torch.where(mean > 0, mean, 1)[:, None, None]
    diagonal += damping
    root, inverse = _coupled(X, _FROM_1000TH)
    if power == 0.25:
        _, inverse = _coupled(root, _COEFFICIENTS)
    unit = torch.linalg.matrix_power(inverse, round(1 / power)) @ X
    error = unit.sub_(torch.eye(X.shape[-1], device=X.device)).abs().amax((1, 2))
    return symmetric(inverse), error < _LARGEST_ERROR


def _coupled(S: Tensor, coefficients: Sequence[tuple[float, float, float]]) -> tuple[Tensor, Tensor]:
    """Return square roots and inverse square roots of positive definite matrices ``[N, d, d]``."""
    scale = torch.linalg.vector_norm(S, dim=(1, 2), keepdim=True)  # no eigenvalue is larger
    root = S / scale
    inverse: Tensor | None = None
    for a, b, c in coefficients:
        W = root if inverse is None else torch.bmm(inverse, root)
        T = torch.baddbmm(W, W, W, beta=b, alpha=c)
        T.diagonal(dim1=-2, dim2=-1).add_(a)
        root, inverse = torch.bmm(root, T), T if inverse is None else torch.bmm(T, inverse)
    assert inverse is not None
    return root * scale.sqrt(), inverse * scale.rsqrt()


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

    Long matrices, unless they are small, are multiplied by the product of all polynomials, which are polynomials of
    ``X Xᵀ`` alone (Gram Newton-Schulz, Dao-AILab 2026). Matrices of zeros stay zero. Cost, with d the smaller of o and
    i: N steps (2 o i + d²) d multiply-adds, or N (2 o i + d² (4 steps - 3)) d for long matrices, in narrow dtypes for
    every two steps.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    X = matrices.mT if tall else matrices
    dtype = at_least_float32(X.dtype)
    norm = torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True, dtype=dtype)
    X = X / norm.clamp_(min=least_norm(dtype)).to(X.dtype)
    coefficients = _COEFFICIENTS[:steps]
    if X.shape[2] > LONG * X.shape[1] and X.shape[2] * X.shape[1] ** 2 >= _GRAM_WORK:
        at_once = steps if X.dtype == dtype else _STEPS_PER_GRAM
        for first in range(0, steps, at_once):
            X = _gram_steps(X, coefficients[first : first + at_once])
    else:
        for a, b, c in coefficients:
            S = torch.bmm(X, X.mT)
            X = torch.baddbmm(X, torch.baddbmm(S, S, S, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X


def _gram_steps(X: Tensor, coefficients: Sequence[tuple[float, float, float]]) -> Tensor:
    """Return long matrices X after the steps with these coefficients, by products of ``X Xᵀ``."""
    S = torch.bmm(X, X.mT)
    Z = P = _multiplier(S, coefficients[0])
    for following in coefficients[1:]:
        S = torch.bmm(torch.bmm(S, Z), Z)
        Z = _multiplier(S, following)
        P = torch.bmm(Z, P)
    return torch.bmm(P, X)


def _multiplier(S: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    """Return ``a I + b S + c S²``."""
    a, b, c = coefficients
    Z = torch.baddbmm(S, S, S, beta=b, alpha=c)
    Z.diagonal(dim1=-2, dim2=-1).add_(a)
    return Z
