"""Quasi-Newton updates of batches of inverse curvatures (Goldfarb, Ren & Bahamou 2020), as pure functions.

Shapes: N blocks, inverses H ``[N, d, d]``, pairs s and y ``[N, d]``, a memory of p pairs ``[N, p, d]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

MU = 0.2
"""μ1 of the double damping."""


def multiply(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Return the products of matrices ``[N, d, d]`` and vectors ``[N, d]``."""
    return (matrices @ vectors[:, :, None])[:, :, 0]


def inner(left: Tensor, right: Tensor) -> Tensor:
    """Return the inner products ``[N]`` of vectors ``[N, d]``."""
    return (left * right).sum(-1)


def damped(s: Tensor, y: Tensor, Hy: Tensor, mu: float) -> tuple[Tensor, Tensor]:
    """Return s and y after double damping (Goldfarb 2020, algorithm 2).

    First ``s ← θ s + (1 - θ) Hy`` where sᵀy < μ1 yᵀHy, with the θ that makes both equal; then likewise
    ``y ← θ y + (1 - θ) s`` where sᵀy < μ2 sᵀs.

    Args:
        s: ``[N, d]``.
        y: ``[N, d]``.
        Hy: ``[N, d]``.
        mu: μ2, in (0, 1).

    Returns:
        s and y, with sᵀy > 0 unless s is zero. Cost: O(N d).
    """
    sy, yHy = inner(s, y), inner(y, Hy)
    theta = _share(sy, yHy, MU)[:, None]
    s = theta * s + (1 - theta) * Hy
    sy, ss = inner(s, y), inner(s, s)
    theta = _share(sy, ss, mu)[:, None]
    return s, theta * y + (1 - theta) * s


def _share(found: Tensor, whole: Tensor, mu: float) -> Tensor:
    """Return the θ at which ``θ found + (1 - θ) whole`` is ``mu whole``, where `found` is below that; 1 elsewhere."""
    low = found < mu * whole
    return torch.where(low, (1 - mu) * whole / torch.where(low, whole - found, 1), 1)


def bfgs(H: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """Return ``H + (ρ² yᵀHy + ρ) ssᵀ - ρ (s yᵀH + H y sᵀ)`` with ρ = 1 / sᵀy; H itself where sᵀy is not above 0.

    Args:
        H: ``[N, d, d]``, symmetric and positive definite.
        s: ``[N, d]``.
        y: ``[N, d]``.

    Returns:
        ``[N, d, d]``, exactly symmetric. Cost: 3 N d² multiply-adds.
    """
    sy, Hy = inner(s, y), multiply(H, y)
    curved = sy > 0
    rho = torch.where(curved, 1 / torch.where(curved, sy, 1), 0)
    # Both rank-two terms as one product u sᵀ + s uᵀ.
    u = (0.5 * (rho * rho * inner(y, Hy) + rho))[:, None] * s - rho[:, None] * Hy
    outer = u[:, :, None] * s[:, None, :]
    return (outer + outer.mT).add_(H)  # both terms are zero without curvature


class Compact:
    """``H = I + Zᵀ[(D + YYᵀ)Z - Y] - YᵀZ`` of p pairs, never formed as a matrix (Byrd, Nocedal & Schnabel 1994).

    R = triu(SYᵀ), D = diag(SYᵀ), Z = R⁻¹S. Every pair has sᵀy > 0; zero rows have no effect.
    """

    def __init__(self, S: Tensor, Y: Tensor) -> None:
        """Prepare for S and Y ``[N, p, d]``, one pair per row, the oldest first. Cost: 2.5 N p² d multiply-adds."""
        wide = S.double()  # R is ill-conditioned if pairs are similar
        R = wide @ Y.double().mT
        D = R.diagonal(dim1=-2, dim2=-1).to(S.dtype)
        R.diagonal(dim1=-2, dim2=-1).masked_fill_(D == 0, 1)
        self._Z = torch.linalg.solve_triangular(R.triu(), wide, upper=True).to(S.dtype)
        self._Y = Y
        self._middle = torch.diag_embed(D) + Y @ Y.mT

    def multiply(self, X: Tensor) -> Tensor:
        """Return ``H X`` for X ``[N, d, m]``. Cost: 4 N p d m + N p² m multiply-adds."""
        ZX, YX = self._Z @ X, self._Y @ X
        product: Tensor = X + self._Z.mT @ (self._middle @ ZX - YX) - self._Y.mT @ ZX
        return product


def append(memory: Tensor, vectors: Tensor) -> Tensor:
    """Return `memory` ``[N, p, d]`` without its oldest row, and with `vectors` ``[N, d]`` as its last."""
    return torch.cat([memory[:, 1:], vectors[:, None]], 1)
