"""Natural gradients from the kernel matrix of samples (Sherman-Morrison-Woodbury; SNGD, and HyLo, Mu 2022).

The Fisher block of a layer is ``F = UᵀU / S`` over S samples, where row n of U is ``g_n ⊗ a_n``. U is never formed:
``U Uᵀ = (A Aᵀ) ∘ (G Gᵀ)``, and products with U and Uᵀ are computed from A and G. The formula is

    (F + αI)⁻¹ v = (1/α) [v - (1/S) Uᵀ M U v],

where M is the inverse of the kernel of all rows (eq. 7, corrected) or of selected rows (eq. 8, corrected).

Shapes: N blocks, m rows (samples of one rank), r selected rows, o outputs, i inputs: ``A [N, m, i]``,
``G [N, m, o]``, ``V [N, o, i]``. S is the number of samples of all ranks, a number or, to avoid a host-device
synchronization, a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

_BATCH = 2**24
"""About how many elements of kernels are decomposed in one batch."""


@dataclass(frozen=True)
class Selection:
    """Selected rows of a rank, padded with zero rows.

    Attributes:
        A: Their inputs ``[N, r, i]``.
        G: Their output gradients ``[N, r, o]``, weighted.
        Y: The matrix ``[N, r, r]`` that accounts for the rows left out, zero for padding rows. None: ``Y = I/α``.
        fine: Whether the selection succeeded ``[N]`` (bool); failed blocks hold zeros.
    """

    A: Tensor
    G: Tensor
    Y: Tensor | None
    fine: Tensor


def gram(A: Tensor, G: Tensor) -> Tensor:
    """Return the kernel ``U Uᵀ = (A Aᵀ) ∘ (G Gᵀ)`` ``[N, m, m]``. Cost: N m² (i + o) multiply-adds."""
    return (A @ A.mT).mul_(G @ G.mT)


def multiply(A: Tensor, G: Tensor, V: Tensor) -> Tensor:
    """Return ``U v`` ``[N, m]``, ``gᵀ V a`` for each row. Cost: N m o i multiply-adds, in N m min(o, i) of memory."""
    left, right = (G @ V, A) if V.shape[-1] <= V.shape[-2] else (A @ V.mT, G)
    products: Tensor = torch.linalg.vecdot(left, right)
    return products


def multiply_transposed(A: Tensor, G: Tensor, c: Tensor) -> Tensor:
    """Return ``Uᵀ c`` as ``Σ_n c_n g_n a_nᵀ`` ``[N, o, i]`` for ``c [N, m]``. Cost: N m o i multiply-adds."""
    if A.shape[-1] <= G.shape[-1]:
        return G.mT @ (A * c[..., None])
    return (G * c[..., None]).mT @ A


def precondition(
    A: Tensor, G: Tensor, M: Tensor, V: Tensor, *, samples: float | Tensor, damping: float | Tensor
) -> Tensor:
    """Return ``(1/α) [V - (1/S) Uᵀ M U V]`` (Mu 2022, eq. 7 and 8, corrected) with the result M of `inverted`.

    S and its α are numbers or ``[N, 1, 1]``. Cost: N (2 r o i + r²) multiply-adds.
    """
    c = (M @ multiply(A, G, V)[..., None])[..., 0]
    return multiply_transposed(A, G, c).div_(-samples).add_(V).div_(damping)


def inverted(
    A: Tensor, G: Tensor, Y: Tensor | None, *, samples: float | Tensor, damping: float
) -> tuple[Tensor, Tensor]:
    """Return ``M = (I + Y K)⁻¹ Y`` with ``K = U Uᵀ / S``, or without Y ``(K + αI)⁻¹``.

    With the Cholesky factor ``Y = L Lᵀ``, ``M = L (I + Lᵀ K L)⁻¹ Lᵀ``, which is symmetric and positive semi-definite.
    Blocks that fail are computed again in float64.

    Args:
        A: The selected input rows of all ranks ``[N, r, i]``.
        G: The selected gradient rows ``[N, r, o]``.
        Y: The diagonal blocks of Y ``[N, P, r/P, r/P]``, one per rank; None: ``I/α``.
        samples: S.
        damping: α.

    Returns:
        M ``[N, r, r]``, zero where it failed, and whether each succeeded ``[N]`` (bool).
    """
    M, fine = _inverted(A, G, Y, samples, damping)
    if not bool(fine.all()):
        for index in (~fine).nonzero().flatten().tolist():
            block = slice(index, index + 1)
            wide = (A[block].double(), G[block].double(), None if Y is None else Y[block].double())
            retried, success = _inverted(*wide, samples, damping)
            M[block] = torch.where(success[:, None, None], retried, 0).to(M.dtype)
            fine[block] = success
    return M, fine


def _inverted(A: Tensor, G: Tensor, Y: Tensor | None, samples: float | Tensor, damping: float) -> tuple[Tensor, Tensor]:
    K = gram(A, G).div_(samples)
    if Y is None:
        K.diagonal(dim1=-2, dim2=-1).add_(damping)
        C, fine = _cholesky(K)
        return torch.cholesky_inverse(C), fine
    # Y is zero for padding rows: a one on the diagonal makes it invertible, and is removed after the factorisation.
    empty = Y.diagonal(dim1=-2, dim2=-1) == 0
    L, fine = _cholesky(Y + torch.diag_embed(empty.to(Y.dtype)))
    L = L.masked_fill(empty[..., None, :], 0)
    blocks = Y.shape[1:3]
    # L is block-diagonal, so its products are computed block by block.
    KL = torch.einsum("napb,npbc->napc", K.unflatten(-1, blocks), L).flatten(2)
    inner = torch.einsum("npba,npbc->npac", L, KL.unflatten(1, blocks)).flatten(1, 2)
    inner = (inner + inner.mT).div_(2)
    inner.diagonal(dim1=-2, dim2=-1).add_(1)
    C, inner_fine = _cholesky(inner)
    # H = C⁻¹ Lᵀ, and M = HᵀH.
    H = torch.linalg.solve_triangular(C, _along_diagonal(L.mT), upper=False)
    return H.mT @ H, fine.all(-1) & inner_fine


def _along_diagonal(blocks: Tensor) -> Tensor:
    """Return the matrices ``[N, P s, P s]`` with diagonal blocks ``[N, P, s, s]``."""
    N, count, size, _ = blocks.shape
    whole = blocks.new_zeros(N, count, size, count, size)
    whole.diagonal(dim1=1, dim2=3).copy_(blocks.movedim(1, -1))
    return whole.flatten(1, 2).flatten(2)


def every(A: Tensor, G: Tensor, count: int) -> Selection:
    """Select all rows ``[N, m, i]`` and ``[N, m, o]``, padded to `count`, the largest number of any rank."""
    padding = (0, 0, 0, count - A.shape[1])
    fine = A.flatten(1).sum(1).isfinite() & G.flatten(1).sum(1).isfinite()
    A, G = (torch.where(fine[:, None, None], pad(rows, padding), 0) for rows in (A, G))
    return Selection(A, G, None, fine)


def interpolate(A: Tensor, G: Tensor, count: int, *, samples: float, damping: float) -> Selection:
    """Select rows by an interpolative decomposition of the kernel, and account for its residual in Y (KID, Mu 2022).

    ``Q = U Uᵀ / S ≈ P Q(S,:)`` by pivoted Cholesky, with ``P(S,:) = I`` and the residual ``R = Q - P Q(S,:)``, which is
    symmetric and positive semi-definite; ``Y = Pᵀ (R + αI)⁻¹ P``. Zero rows have no effect. Blocks that fail are
    computed again in float64. `count` is r, the number of rows to select. Cost: N (m² (i + o + r) + m³/3)
    multiply-adds, in 3 m² elements of memory per block; blocks are processed in chunks.
    """
    A, G = _at_least_one(A, G)
    rows = A.shape[1]
    step = max(1, _BATCH // max(1, rows * rows))
    found = []
    for start in range(0, len(A), step):
        part = slice(start, start + step)
        found.append(_interpolate(A[part], G[part], count, samples, damping))
    pivots, live, Y, fine = (torch.cat(parts) for parts in zip(*found, strict=True))
    for index in (~fine).nonzero().flatten().tolist() if A.dtype != torch.float64 else ():
        block = slice(index, index + 1)
        wide = _interpolate(A[block].double(), G[block].double(), count, samples, damping)
        for result, retried in zip((pivots, live, Y, fine), wide, strict=True):
            result[block] = retried.to(result.dtype)
    live = live & fine[:, None]
    return Selection(pick(A, pivots, live), pick(G, pivots, live), torch.where(fine[:, None, None], Y, 0), fine)


def _interpolate(
    A: Tensor, G: Tensor, count: int, samples: float, damping: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the pivots ``[N, r]``, a mask of those that are rows, Y, and whether each block succeeded ``[N]``."""
    Q = gram(A, G).div_(samples)
    L, pivots, live = pivoted_cholesky(Q, count)
    selected = torch.where(live[..., None], L.gather(1, pivots[..., None].expand(-1, -1, count)), 0)  # L(S,:)
    selected.diagonal(dim1=-2, dim2=-1).masked_fill_(~live, 1)
    P = torch.linalg.solve_triangular(selected, L, upper=False, left=False)
    R = Q.baddbmm_(L, L.mT, alpha=-1)
    diagonal = R.diagonal(dim1=-2, dim2=-1)
    diagonal.clamp_(min=0).add_(damping)
    C, fine = _cholesky(R)
    Z = torch.linalg.solve_triangular(C, P, upper=False)
    Y = Z.mT @ Z
    return pivots, live, Y, fine & Y.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)


def pivoted_cholesky(Q: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Factorise ``Q ≈ L Lᵀ``, taking the largest remaining diagonal entry first.

    It stops when that entry is at most 1e-12 (float64) or m ε (float32) times the largest of ``Q [N, m, m]``.

    Returns:
        L ``[N, m, r]`` for `count` r, the pivots ``[N, r]``, and which of them are valid ``[N, r]`` (bool): the other
        columns of L are zero. Cost: N m r² / 2 multiply-adds.
    """
    N, rows = Q.shape[:2]
    remaining = Q.diagonal(dim1=-2, dim2=-1).clone()
    tolerance = 1e-12 if Q.dtype == torch.float64 else rows * torch.finfo(Q.dtype).eps
    least, nothing = remaining.amax(-1) * tolerance, Q.new_zeros(())
    L = Q.new_zeros(N, count, rows)  # transposed, so that each column is contiguous
    blocks, active = torch.arange(N, device=Q.device), torch.ones(N, dtype=torch.bool, device=Q.device)
    places, valid = [], []
    for index in range(min(count, rows)):  # few calls, because a GPU spends its time on launches
        pivot, place = remaining.max(-1)
        active = active & (pivot > least)
        before = L[:, :index]
        column = torch.baddbmm(Q[blocks, place][:, None], before[blocks, :, place][:, None], before, alpha=-1)[:, 0]
        # Rows taken before, whose diagonal is -inf, hold only rounding errors.
        column = torch.where((remaining > -torch.inf) & active[:, None], column / pivot[:, None].sqrt(), nothing)
        L[:, index] = column
        remaining = remaining.addcmul(column, column, value=-1).scatter_(1, place[:, None], -torch.inf)
        places.append(place)
        valid.append(active)
    missing = (0, count - len(places))
    return L.mT, pad(torch.stack(places, 1), missing), pad(torch.stack(valid, 1), missing)


def scores(A: Tensor, G: Tensor) -> Tensor:
    """Return ``‖a_j‖ ‖g_j‖``, the norms of the rows of U ``[N, m]``, in float64."""
    norm_A, norm_G = (torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64) for rows in (A, G))
    product: Tensor = norm_A * norm_G
    return product


def inclusion(scores: Tensor, count: int) -> Tensor:
    """Return probabilities proportional to `scores`, capped at 1, that sum to `count` (or to the number of scores > 0).

    `scores` ``[N, m]`` are in descending order.
    """
    positive = scores > 0
    rest = scores.flip(-1).cumsum(-1).flip(-1)  # sums of a row and all that follow
    # The number of capped rows, if this row is the first that is not.
    capped = torch.arange(scores.shape[-1], device=scores.device)
    share = (count - capped).clamp(min=0) / torch.where(positive, rest, 1)
    # All rows after the first that need no cap have lower scores.
    free = positive & (share * scores <= 1) & (positive.sum(-1, keepdim=True) > count)
    first = free.to(torch.int8).argmax(-1, keepdim=True)
    probability = torch.where(free.any(-1, keepdim=True) & (capped >= first), share.gather(-1, first) * scores, 1)
    return torch.where(positive, probability, 0)


def sample(A: Tensor, G: Tensor, count: int, *, starts: Tensor) -> Selection:
    """Draw rows with probabilities proportional to their norms, without replacement (KIS, Mu 2022).

    Sampling is systematic. A drawn row of G is divided by the root of its probability, so that ``UᵀU`` is unbiased
    (the paper does not do this). Zero rows are never drawn. `count` is r, the number of rows to draw; `starts` are
    uniformly random numbers in [0, 1) ``[N]`` (float64).
    """
    A, G = _at_least_one(A, G)
    found, order = scores(A, G).sort(-1, descending=True)
    fine = found.isfinite().all(-1)
    found = torch.where(fine[:, None], found, 0)
    probability = inclusion(found, count)
    grid = torch.arange(count, dtype=torch.float64, device=A.device) + starts[:, None]
    known = (found > 0).sum(-1, keepdim=True)
    place = torch.searchsorted(probability.cumsum(-1), grid, right=True).clamp_(max=(known - 1).clamp(min=0))
    live = torch.arange(count, device=A.device) < known
    weight = probability.gather(-1, place).rsqrt().masked_fill(~live, 0).to(G.dtype)
    rows = order.gather(-1, place)
    return Selection(pick(A, rows, live), pick(G, rows, live) * weight[..., None], None, fine)


def pick(rows: Tensor, indices: Tensor, live: Tensor) -> Tensor:
    """Return the rows at `indices` ``[N, r]`` of ``[N, m, d]``, zero where not `live`."""
    chosen = rows.gather(1, indices[..., None].expand(-1, -1, rows.shape[2]))
    return torch.where(live[..., None], chosen, 0)


def _at_least_one(A: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows; a zero row for a rank that has none."""
    if A.shape[1]:
        return A, G
    return A.new_zeros(len(A), 1, A.shape[2]), G.new_zeros(len(G), 1, G.shape[2])


def _cholesky(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors, and whether each succeeded ``[N]``; the diagonal of the others is 1."""
    factor, info = torch.linalg.cholesky_ex(matrices)
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    fine = (info == 0) & diagonal.isfinite().all(-1)
    diagonal.masked_fill_(~fine[..., None], 1)
    return factor, fine
