"""Natural gradients by way of the kernel of samples (Sherman-Morrison-Woodbury; SNGD, and HyLo, Mu 2022).

The Fisher block of a layer is ``F = UᵀU / S`` over S samples, where row n of U is ``g_n ⊗ a_n``. U is never formed:
``U Uᵀ = (A Aᵀ) ∘ (G Gᵀ)``, and products with U and Uᵀ are those of its two factors. Everything here is one formula,

    (F + αI)⁻¹ v = (1/α) [v - (1/S) Uᵀ M U v],

with the kernel's inverse M: of all rows (eq. 7, corrected), or of few rows that stand for all (eq. 8, corrected).

Shapes: N blocks, m rows (samples of one rank), r of them selected, o outputs, i inputs: ``A [N, m, i]``,
``G [N, m, o]``, ``V [N, o, i]``. S counts the samples of all ranks, as a tensor too: then nothing waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from natgrad.linalg.device import known_all

_BATCH = 2**24
"""About how many elements of kernels are decomposed together."""

_SQUARES = (1e-15, 1e15)
"""Between these, norms of float32 do without squares of float64, for which a CPU needs four times as long."""


@dataclass(frozen=True)
class Selection:
    """Rows that stand for all those of a rank; where there are fewer than wanted, the last ones are zero.

    Attributes:
        A: Their inputs ``[N, r, i]``.
        G: Their output gradients ``[N, r, o]``, weighted.
        Y: What links them to the rows left out ``[N, r, r]``, zero beside zero rows; None: nothing, ``Y = I/α``.
        fine: Whether the selection succeeded ``[N]`` (bool); what failed holds zeros.
    """

    A: Tensor
    G: Tensor
    Y: Tensor | None
    fine: Tensor


def gram(A: Tensor, G: Tensor) -> Tensor:
    """Return the kernel ``U Uᵀ = (A Aᵀ) ∘ (G Gᵀ)`` ``[N, m, m]``. Cost: N m² (i + o) multiply-adds."""
    return (A @ A.mT).mul_(G @ G.mT)


def multiply(A: Tensor, G: Tensor, V: Tensor) -> Tensor:
    """Return ``U v`` ``[N, m]``, of each row ``gᵀ V a``. Cost: N m o i multiply-adds, in N m min(o, i) of memory."""
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
    """Return ``(1/α) [V - (1/S) Uᵀ M U V]`` (Mu 2022, eq. 7 and 8, corrected).

    Args:
        A: Rows of inputs ``[N, r, i]``.
        G: Rows of output gradients ``[N, r, o]``.
        M: What `inverted` returned for them ``[N, r, r]``.
        V: The gradient ``[N, o, i]``.
        samples: S, a number or ``[N]``.
        damping: The α that M was made with, a number or ``[N]``.

    Returns:
        ``[N, o, i]``. Cost: N (2 r o i + r²) multiply-adds.
    """
    c = (M @ multiply(A, G, V)[..., None])[..., 0]
    return multiply_transposed(A, G, c).div_(-_last(samples, 2)).add_(V).div_(_last(damping, 2))


def inverted(
    A: Tensor, G: Tensor, Y: Tensor | None, *, samples: float | Tensor, damping: float
) -> tuple[Tensor, Tensor]:
    """Return ``M = (I + Y K)⁻¹ Y`` with ``K = U Uᵀ / S``, and without Y ``(K + αI)⁻¹``; K itself is never inverted.

    By Cholesky factors, ``Y = L Lᵀ`` and ``M = L (I + Lᵀ K L)⁻¹ Lᵀ``: symmetric, and no less definite than Y. What
    fails is tried again in float64.

    Args:
        A: The selected rows of all ranks ``[N, r, i]``.
        G: The same ``[N, r, o]``.
        Y: The blocks along the diagonal of Y ``[N, P, r/P, r/P]``, one a rank; None: ``I/α``.
        samples: S, a number or ``[N]``.
        damping: α.

    Returns:
        M ``[N, r, r]``, zero where it failed, and whether each succeeded ``[N]`` (bool).
    """
    M, fine = _inverted(A, G, Y, samples, damping)
    if not bool(fine.all()):
        for index in (~fine).nonzero().flatten().tolist():
            own = slice(index, index + 1)
            count = samples[own].double() if isinstance(samples, Tensor) and samples.ndim else samples
            wide = (A[own].double(), G[own].double(), None if Y is None else Y[own].double())
            retried, success = _inverted(*wide, count, damping)
            M[own] = torch.where(success[:, None, None], retried, 0).to(M.dtype)
            fine[own] = success
    return M, fine


def _inverted(A: Tensor, G: Tensor, Y: Tensor | None, samples: float | Tensor, damping: float) -> tuple[Tensor, Tensor]:
    K = gram(A, G).div_(_last(samples, 2))
    if Y is None:
        K.diagonal(dim1=-2, dim2=-1).add_(damping)
        C, fine = _cholesky(K)
        return torch.cholesky_inverse(C), fine
    # Padded rows have no Y: a one on the diagonal lets the factorisation pass, and is taken out again.
    empty = Y.diagonal(dim1=-2, dim2=-1) == 0
    L, fine = _cholesky(Y + torch.diag_embed(empty.to(Y.dtype)))
    L = L.masked_fill(empty[..., None, :], 0)
    ranks, own = Y.shape[1:3]
    # L is block-diagonal: its products are those of the blocks, a rank at a time.
    KL = torch.einsum("napb,npbc->napc", K.unflatten(-1, (ranks, own)), L).flatten(2)
    inner = torch.einsum("npba,npbc->npac", L, KL.unflatten(1, (ranks, own))).flatten(1, 2)
    inner = (inner + inner.mT).div_(2)
    inner.diagonal(dim1=-2, dim2=-1).add_(1)
    C, well = _cholesky(inner)
    # H = C⁻¹ Lᵀ, and M = HᵀH.
    H = torch.linalg.solve_triangular(C, along_diagonal(L.mT), upper=False)
    return H.mT @ H, fine.all(-1) & well


def along_diagonal(blocks: Tensor) -> Tensor:
    """Return the matrices ``[N, P s, P s]`` whose blocks along the diagonal are `blocks` ``[N, P, s, s]``."""
    N, count, size, _ = blocks.shape
    whole = blocks.new_zeros(N, count, size, count, size)
    whole.diagonal(dim1=1, dim2=3).copy_(blocks.movedim(1, -1))
    return whole.flatten(1, 2).flatten(2)


def every(A: Tensor, G: Tensor, count: int) -> Selection:
    """Select all rows ``[N, m, i]`` and ``[N, m, o]``, where other ranks have up to `count` of them."""
    padding = (0, 0, 0, count - A.shape[1])
    fine = A.flatten(1).sum(1).isfinite() & G.flatten(1).sum(1).isfinite()
    A, G = (torch.where(fine[:, None, None], pad(rows, padding), 0) for rows in (A, G))
    return Selection(A, G, None, fine)


def interpolate(A: Tensor, G: Tensor, count: int, *, samples: float | Tensor, damping: float) -> Selection:
    """Select rows by an interpolative decomposition of the kernel, and keep what it leaves over (KID, Mu 2022).

    ``Q = U Uᵀ / S ≈ P Q(S,:)`` by pivoted Cholesky, with ``P(S,:) = I`` and the residual ``R = Q - P Q(S,:)``, which is
    symmetric and positive semi-definite; ``Y = Pᵀ (R + αI)⁻¹ P``. Rows of zeros change nothing. What fails is tried
    again in float64.

    Args:
        A: The rows of this rank ``[N, m, i]``.
        G: The same ``[N, m, o]``.
        count: r, how many are selected.
        samples: S of all ranks, a number or ``[N]``.
        damping: α.

    Returns:
        The rows and Y. Cost: N (m² (i + o + r) + m³/3) multiply-adds; some blocks at a time, in 3 m² elements each.
    """
    A, G = _at_least_one(A, G)
    rows = A.shape[1]
    step = max(1, _BATCH // max(1, rows * rows))
    found = []
    for start in range(0, len(A), step):
        own = slice(start, min(start + step, len(A)))
        found.append(_interpolate(A[own], G[own], count, _part(samples, own), damping))
    pivots, live, Y, fine = (torch.cat(each) for each in zip(*found, strict=True))
    for index in (~fine).nonzero().flatten().tolist() if A.dtype != torch.float64 else ():
        own = slice(index, index + 1)
        wide = _interpolate(A[own].double(), G[own].double(), count, _part(samples, own), damping)
        for kept, retried in zip((pivots, live, Y, fine), wide, strict=True):
            kept[own] = retried.to(kept.dtype)
    live = live & fine[:, None]
    return Selection(pick(A, pivots, live), pick(G, pivots, live), torch.where(fine[:, None, None], Y, 0), fine)


def _interpolate(
    A: Tensor, G: Tensor, count: int, samples: float | Tensor, damping: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the pivots ``[N, r]``, which of them are rows, Y, and whether the blocks are fine."""
    Q = gram(A, G).div_(_last(samples, 2))
    L, pivots, live = pivoted_cholesky(Q, count)
    own = torch.where(live[..., None], L.gather(1, pivots[..., None].expand(-1, -1, count)), 0)  # L(S,:)
    own.diagonal(dim1=-2, dim2=-1).masked_fill_(~live, 1)
    P = torch.linalg.solve_triangular(own, L, upper=False, left=False)
    R = Q.baddbmm_(L, L.mT, alpha=-1)
    diagonal = R.diagonal(dim1=-2, dim2=-1)
    diagonal.clamp_(min=0).add_(damping)
    C, fine = _cholesky(R)
    Z = torch.linalg.solve_triangular(C, P, upper=False)
    Y = Z.mT @ Z
    return pivots, live, Y, fine & Y.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)


def pivoted_cholesky(Q: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Factorise ``Q ≈ L Lᵀ``, the largest remaining diagonal entry first.

    It ends where that is no more than 1e-12 of the largest of all (float64), or m ε of it (float32).

    Args:
        Q: ``[N, m, m]``, symmetric and positive semi-definite.
        count: r, the number of pivots.

    Returns:
        L ``[N, m, r]``, the pivots ``[N, r]``, and which of them are any ``[N, r]`` (bool): the columns of L beyond are
        zero. Cost: N m r² / 2 multiply-adds.
    """
    N, rows = Q.shape[:2]
    remaining = Q.diagonal(dim1=-2, dim2=-1).clone()
    tolerance = 1e-12 if Q.dtype == torch.float64 else rows * torch.finfo(Q.dtype).eps
    least, nothing = remaining.amax(-1) * tolerance, Q.new_zeros(())
    L = Q.new_zeros(N, count, rows)  # transposed, so that each column is written and read in one piece
    blocks, going = torch.arange(N, device=Q.device), torch.ones(N, dtype=torch.bool, device=Q.device)
    places, goes = [], []
    for index in range(min(count, rows)):  # few calls, which take the time on a GPU
        pivot, place = remaining.max(-1)
        going = going & (pivot > least)
        before = L[:, :index]
        column = torch.baddbmm(Q[blocks, place][:, None], before[blocks, :, place][:, None], before, alpha=-1)[:, 0]
        # What is left of the rows taken before, whose diagonal is -inf, is rounding.
        column = torch.where((remaining > -torch.inf) & going[:, None], column / pivot[:, None].sqrt(), nothing)
        L[:, index] = column
        remaining = remaining.addcmul(column, column, value=-1).scatter_(1, place[:, None], -torch.inf)
        places.append(place)
        goes.append(going)
    missing = (0, count - len(places))
    return L.mT, pad(torch.stack(places, 1), missing), pad(torch.stack(goes, 1), missing)


def scores(A: Tensor, G: Tensor) -> Tensor:
    """Return ``‖a_j‖ ‖g_j‖``, the norms of the rows of U ``[N, m]``, in float64."""
    return _norms(A) * _norms(G)


def inclusion(scores: Tensor, count: int) -> Tensor:
    """Return the probabilities proportional to `scores`, capped at 1, that sum to `count` (or to all that are above 0).

    Args:
        scores: ``[N, m]``, in descending order.
        count: r.

    Returns:
        π ``[N, m]``.
    """
    positive = scores > 0
    rest = scores.flip(-1).cumsum(-1).flip(-1)  # of a row and all that follow
    capped = torch.arange(scores.shape[-1], device=scores.device)  # how many are, if this row is the first that is not
    share = (count - capped).clamp(min=0) / torch.where(positive, rest, 1)
    # The first row that need not be capped decides: those that follow have lower scores.
    free = positive & (share * scores <= 1) & (positive.sum(-1, keepdim=True) > count)
    first = free.to(torch.int8).argmax(-1, keepdim=True)
    probability = torch.where(free.any(-1, keepdim=True) & (capped >= first), share.gather(-1, first) * scores, 1)
    return torch.where(positive, probability, 0)


def sample(A: Tensor, G: Tensor, count: int, *, starts: Tensor) -> Selection:
    """Draw rows with probabilities proportional to their norms, without replacement (KIS, Mu 2022).

    The drawing is systematic; a drawn row of G is divided by the root of its probability, so that ``UᵀU`` is unbiased
    (the paper's authors leave that out). Rows of zeros are never drawn.

    Args:
        A: The rows of this rank ``[N, m, i]``.
        G: The same ``[N, m, o]``.
        count: r, how many are drawn.
        starts: One uniformly random number in [0, 1) for each block ``[N]`` (float64).

    Returns:
        The rows. Cost: N m (i + o) multiply-adds and sorting.
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


def _norms(rows: Tensor) -> Tensor:
    """Return the norms of rows ``[N, m]`` in float64; those of a block hang on no other."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1).double()
    fits = ((norms > _SQUARES[0]) & (norms < _SQUARES[1])).all(-1)
    if known_all(fits):
        return norms
    return torch.where(fits[:, None], norms, torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64))


def pick(rows: Tensor, indices: Tensor, live: Tensor) -> Tensor:
    """Return the rows at `indices` ``[N, r]`` of ``[N, m, d]``, zero where not `live`."""
    chosen = rows.gather(1, indices[..., None].expand(-1, -1, rows.shape[2]))
    return torch.where(live[..., None], chosen, 0)


def _at_least_one(A: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows, of a rank without any a row of zeros."""
    if A.shape[1]:
        return A, G
    return A.new_zeros(len(A), 1, A.shape[2]), G.new_zeros(len(G), 1, G.shape[2])


def _cholesky(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors, and which of them are any; the others can be calculated with all the same."""
    factor, info = torch.linalg.cholesky_ex(matrices)
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    fine = (info == 0) & diagonal.isfinite().all(-1)
    diagonal.masked_fill_(~fine[..., None], 1)
    return factor, fine


def _last(value: float | Tensor, dims: int) -> float | Tensor:
    """Return a number, or ``[N]`` with `dims` dimensions behind."""
    return value if not isinstance(value, Tensor) or not value.ndim else value.view(-1, *[1] * dims)


def _part(value: float | Tensor, blocks: slice) -> float | Tensor:
    return value if not isinstance(value, Tensor) or not value.ndim else value[blocks]
