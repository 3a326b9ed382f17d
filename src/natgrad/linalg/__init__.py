"""The linear algebra of Kronecker-factored curvature, as pure functions of batches of matrices.

Shapes: ``N`` blocks of equal size, ``o`` outputs, ``i`` inputs (one more with a bias), ``d`` either of them. A
gradient block is ``W [N, o, i]``; a Fisher block is ``G [N, o, o]`` ⊗ ``A [N, i, i]`` in row-major order, so that
``(G ⊗ A) vec(W) = vec(G W A)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

from natgrad.linalg.device import on_host


def tensor_on(device: torch.device, values: Sequence[float], dtype: torch.dtype | None = None) -> Tensor:
    """Return `values` as a tensor on `device`, without the synchronization of ``torch.tensor(values, device=...)``."""
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Decompose symmetric positive semi-definite ``matrices [N, d, d]``, in float64 where their own dtype fails.

    Only the lower triangles are read.

    Returns:
        Eigenvalues ``[N, d]``, ascending and clamped at 0, eigenvectors ``[N, d, d]`` in columns, and whether each
        decomposition succeeded ``[N]`` (bool). Failed blocks hold zeros. Cost: about 9 N d³ operations.
    """
    try:
        values, vectors = _eigh(matrices)
        # A sum is finite only if all terms are, and is much cheaper than testing each. Eigenvectors cannot overflow it.
        if isfinite(values.sum() + vectors.sum()):
            return values.clamp_(min=0), vectors, torch.ones(len(matrices), dtype=torch.bool, device=matrices.device)
        fine = (values.sum(-1) + vectors.sum((-2, -1))).isfinite()
    except RuntimeError:  # torch.linalg.LinAlgError is one
        values, vectors = matrices.new_zeros(matrices.shape[:-1]), torch.zeros_like(matrices)
        fine = torch.zeros(matrices.shape[0], dtype=torch.bool, device=matrices.device)
    for index in (~fine).nonzero().flatten().tolist():
        values[index], vectors[index] = 0, 0
        try:
            retried = _eigh(matrices[index, None].double())
        except RuntimeError:  # torch.linalg.LinAlgError is one
            continue
        if bool(retried[0].isfinite().all() & retried[1].isfinite().all()):
            values[index], vectors[index], fine[index] = retried[0][0], retried[1][0], True
    return values.clamp_(min=0), vectors, fine


def damped_inverse(matrices: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """Invert ``matrices + damping I`` by Cholesky, in float64 where their own dtype fails.

    For matrices that are indefinite by rounding, such as factors in bfloat16, negative eigenvalues count as zero. Only
    the lower triangles of ``matrices [N, d, d]`` are read; `damping` is ``[N]``.

    Returns:
        The inverses ``[N, d, d]`` and whether each succeeded ``[N]`` (bool). Failed blocks hold zeros. Cost: N d³
        multiply-adds.
    """
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)
    undamped = diagonal.clone()
    diagonal.add_(damping[:, None])  # restored below, which saves a copy of the matrices
    inverses, fine = _spd_inverse(matrices)
    if not bool(fine.all()):
        for index in (~fine).nonzero().flatten().tolist():
            whole = matrices[index : index + 1].double()
            retried, success = _spd_inverse(whole)
            if not bool(success):
                retried, success = _projected_inverse(whole, damping[index])
            fine[index] = success[0]
            inverses[index] = torch.where(success[0], retried[0], torch.zeros_like(retried[0]))
    diagonal.copy_(undamped)
    return inverses, fine


def _projected_inverse(damped: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """Invert damped matrices that are indefinite by rounding: eigenvalues below the damping are raised to it."""
    values, vectors, fine = eigh(damped)
    return symmetric((vectors / values.clamp(min=damping)[:, None, :]) @ vectors.mT), fine


def _eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigendecomposition of symmetric matrices, as ``torch.linalg.eigh``."""
    if on_host(matrices):
        return tuple(torch.linalg.eigh(matrices))
    scaled, scale = rescale_(matrices.clone())  # CUDA's Jacobi iteration squares elements
    values, vectors = torch.linalg.eigh(scaled)
    return values * scale, vectors


def rescale_(F: Tensor) -> tuple[Tensor, Tensor]:
    """Divide positive semi-definite matrices, in place, by their largest entries, so that squares do not overflow.

    Returns:
        F and the divisors ``[N, 1]``.
    """
    scale = F.diagonal(dim1=-2, dim2=-1).amax(-1)
    scale = torch.where((scale > 0) & (scale < torch.inf), scale, 1)[:, None]
    return F.div_(scale[:, :, None]), scale


def _spd_inverse(matrices: Tensor) -> tuple[Tensor, Tensor]:
    factor, info = torch.linalg.cholesky_ex(matrices)
    # cholesky_inverse raises if a diagonal entry is 0, as a failed factorisation may leave it.
    factor.diagonal(dim1=-2, dim2=-1).masked_fill_((info != 0)[:, None], 1)
    if on_host(factor):
        inverses = torch.cholesky_inverse(factor)
    else:  # half the time of `torch.cholesky_inverse` on an H100
        unit = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand_as(factor)
        halves = torch.linalg.solve_triangular(factor, unit, upper=False)
        inverses = symmetric(halves.mT @ halves)
    return inverses, (info == 0) & inverses.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)


def symmetric(matrices: Tensor) -> Tensor:
    """Return the symmetric matrices ``[N, d, d]`` with these lower triangles, as a new tensor."""
    lower = matrices.new_ones(matrices.shape[-2:], dtype=torch.bool).tril_()
    return torch.where(lower, matrices, matrices.mT)


def trace_balance(mean_a: Tensor, mean_g: Tensor) -> Tensor:
    """Return π = sqrt((tr A / d_A) / (tr G / d_G)), 1 where either trace is 0 (Martens & Grosse 2015, section 6.3)."""
    balanced = (mean_a > 0) & (mean_g > 0)
    return torch.where(balanced, mean_a / torch.where(balanced, mean_g, 1), 1).sqrt()


def solve_pairs(W: Tensor, F: Tensor, damping: float) -> Tensor:
    """Solve ``[[f11 + γ, f12], [f12, f22 + γ]] v = w`` for each output (Osawa 2020, SP-NGD).

    The closed form ``1/D [[f22 + γ, -f12], [-f12, f11 + γ]]`` is computed from the Schur complement of f11 + γ.
    f11 f22 - f12² is clamped at 0, because rounding could make D negative. F holds f11, f22 and f12 ``[N, o, 3]``.
    """
    (w1, w2), (f11, f22, f12) = W.unbind(-1), F.unbind(-1)
    pivot = f11 + damping
    ratio = f12 / pivot
    determinant = torch.addcmul(f11 * f22, f12, f12, value=-1).clamp_(min=0)
    v2 = (w2 - ratio * w1) / ((determinant + damping * f22) / pivot + damping)
    return torch.stack([w1 / pivot - ratio * v2, v2], -1)


def solve_rank_one(W: Tensor, a: Tensor, g: Tensor, damping: float) -> Tensor:
    """Return ``(ggᵀ ⊗ aaᵀ + γI)⁻¹ W`` = [W - g (gᵀ W a) aᵀ / (‖g‖² ‖a‖² + γ)] / γ (Zhang 2023)."""
    a, g = a[:, :, None], g[:, :, None]
    share = (g.mT @ (W @ a)) / (g.square().sum(1, keepdim=True) * a.square().sum(1, keepdim=True) + damping)
    return torch.baddbmm(W, g * share, a.mT, alpha=-1).div_(damping)


def product(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return ``left @ right`` in the wider dtype of both, with the factors rounded to the narrower.

    `out` is used only if both have the same dtype and no gradients are recorded.
    """
    # `matmul` copies the transpose of a single matrix. (`len` of a tensor is slow.)
    stacks = left.ndim == right.ndim == 3 and left.shape[0] == right.shape[0]
    multiply = torch.bmm if stacks else torch.matmul
    if left.dtype == right.dtype:
        return multiply(left, right) if torch.is_grad_enabled() else multiply(left, right, out=out)
    narrow, wide = sorted((left.dtype, right.dtype), key=lambda dtype: dtype.itemsize)
    return multiply(left.to(narrow), right.to(narrow)).to(wide)
