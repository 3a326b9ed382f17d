"""The numerical rank of the kernel of samples by batch size (HyLo, Mu 2022, figure 10)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.curvature import kernel

SHARE = 0.9
"""The paper's criterion: "the number of eigenvalues that contribute to 90% of their sum"."""


@dataclass(frozen=True, kw_only=True)
class KernelRank:
    """The kernel of one layer at one batch size.

    Attributes:
        step: Optimizer steps before.
        layer: The layer's name.
        batch_size: Rows of the kernel.
        rank: Its numerical rank, the mean over the layer's blocks; NaN if the kernel is not finite.
        share: The rank divided by the batch size.
    """

    step: int
    layer: str
    batch_size: int
    rank: float
    share: float


def leading(eigenvalues: Tensor, share: float = SHARE) -> Tensor:
    """Return the number of largest eigenvalues that make up a share of the sum.

    Args:
        eigenvalues: ``[..., d]`` in any order; negative ones count as zero.
        share: The share, in (0, 1].

    Returns:
        Integers ``[...]``; 0 where all eigenvalues are 0.
    """
    values = eigenvalues.clamp(min=0).sort(-1, descending=True).values
    sums = values.cumsum(-1)
    total = sums[..., -1:]
    # The last sum equals the total, so that there is always one that reaches the share.
    return torch.where(total[..., 0] > 0, (sums < share * total).sum(-1) + 1, 0)


def numerical_rank(K: Tensor, share: float = SHARE) -> Tensor:
    """Return the numerical ranks of symmetric positive semi-definite matrices ``[..., m, m]``, as integers."""
    return leading(torch.linalg.eigvalsh(K), share)


def ranks(step: int, layer: str, A: Tensor, G: Tensor, batch_sizes: Iterable[int]) -> list[KernelRank]:
    """Measure the kernel ``(A Aᵀ) ∘ (G Gᵀ)`` of the first rows, for each batch size.

    Args:
        step: Optimizer steps before.
        layer: The layer's name.
        A: Rows of inputs ``[n, m, i]``.
        G: Rows of output gradients ``[n, m, o]``.
        batch_sizes: The numbers of rows; those beyond m are left out.

    Returns:
        One entry per batch size.
    """
    K = kernel.gram(A.double(), G.double())
    found = []
    for size in batch_sizes:
        if size <= K.shape[-1]:
            part = K[:, :size, :size]
            fine = bool(part.isfinite().all())
            rank = float(numerical_rank(part).double().mean()) if fine else float("nan")
            found.append(KernelRank(step=step, layer=layer, batch_size=size, rank=rank, share=rank / size))
    return found
