"""Inverse roots and polar factors of stacked matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.linalg import eigh, product

# Five steps with these coefficients bring singular values between 0.002 and 1 to between 0.7 and 1.2 (Jordan 2024).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def inverse_root(matrices: Tensor, damping: float, power: float) -> tuple[Tensor, Tensor]:
    """Return ``(X / m + δ I)^-p`` with the mean eigenvalue m = tr X / d. A matrix of zeros counts as X / m = 0.

    Args:
        matrices: X ``[N, d, d]``, symmetric positive semi-definite; only the lower triangles are read.
        damping: δ.
        power: p.

    Returns:
        ``[N, d, d]``, symmetric, and whether each succeeded ``[N]`` (bool). Cost: about 10 N d³ multiply-adds.
    """
    values, vectors, succeeded = eigh(matrices)
    mean = values.mean(-1, keepdim=True)
    roots = (values / torch.where(mean > 0, mean, 1) + damping).pow_(-power)
    half = vectors * roots.sqrt()[:, None, :]
    return product(half, half.mT), succeeded


def polar(matrices: Tensor, steps: int | None) -> Tensor:
    """Return the polar factors U Vᵀ of matrices U Σ Vᵀ.

    Args:
        matrices: ``[N, o, i]``. Matrices of zeros stay zero.
        steps: The number of Newton-Schulz steps of order five. They leave singular values between 0.7 and 1.2, which is
            as good for training as 1 (Jordan 2024, Muon). None: exact, by singular value decompositions;
            values below sqrt(ε) of the largest are noise and count as zero.

    Returns:
        ``[N, o, i]``. Cost with s the smaller and l the larger side: N s (2 s l + s²) multiply-adds a step.
    """
    if steps is None:
        U, values, Vh = torch.linalg.svd(matrices, full_matrices=False)
        least = values[:, :1] * torch.finfo(values.dtype).eps ** 0.5
        return product(U * (values > least)[:, None, :], Vh)
    a, b, c = _COEFFICIENTS
    wide = matrices.shape[1] <= matrices.shape[2]
    X = matrices if wide else matrices.mT
    norm = torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True)
    X = X / torch.where(norm > 0, norm, 1)
    for _ in range(steps):
        S = product(X, X.mT)
        X = torch.baddbmm(X, torch.baddbmm(S, S, S, beta=b, alpha=c), X, beta=a)
    return X if wide else X.mT
