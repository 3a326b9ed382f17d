"""Eigendecompositions that start from the last result and improve it by matrix products.

Running averages change little between two refreshes, so that the last basis is nearly the next one. Its residual is
computed first; bases that fail the test are rotated, and blocks that still fail are decomposed from scratch. Shapes: N
blocks of size d. Norms are Frobenius norms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.errors import require
from natgrad.linalg import eigh, product, rescale_, symmetric, tensor_on
from natgrad.schedule import check_whole

# The first iteration rotates one in _FIRST eigenvectors, later ones one in _LATER; each typically divides the residual
# by _GAIN.
_FIRST, _LATER = 8, 4
_GAIN = 4.0
# The allowed deviation of a basis from orthogonality, in units of the rounding of its dtype; LAPACK's have about 10.
_SKEW = 1000.0


@dataclass(frozen=True, kw_only=True)
class Warm:
    """Settings of decompositions that start from the last result.

    Attributes:
        tolerance: The relative residual at which a result is accepted.
        iterations: The largest number of iterations before a decomposition from scratch.

    Raises:
        ValueError: unless `tolerance` is a number in (0, 1) and `iterations` a whole number >= 0.
    """

    tolerance: float
    iterations: int

    def __post_init__(self) -> None:
        number = isinstance(self.tolerance, float) and 0 < self.tolerance < 1
        require(number, "tolerance", self.tolerance, "a number in (0, 1)")
        check_whole("iterations", self.iterations, 0)

    def eigh(self, matrices: Tensor, basis: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Decompose symmetric positive semi-definite matrices F, starting from the eigenvectors Q of similar matrices.

        With D = diag(QᵀFQ), the part of QᵀFQ off the diagonal has the norm of the residual ``FQ - QD``. If that is at
        most `tolerance` ‖F‖, the basis stays and D are the eigenvalues. Otherwise the leading quarter of the basis is
        rotated up to `iterations` times: by a Rayleigh-Ritz step within it, then against the other vectors by the
        angles that diagonalise F on each pair (Jacobi 1846), at most 45 degrees, combined in the direct rotation, the
        orthogonal map that moves a subspace least (Davis & Kahan 1970, section 4). `linalg.eigh` decomposes blocks
        that still fail the test or are too far from it at the start.

        With τ the tolerance, ``QDQᵀ`` is positive semi-definite and at most τ‖F‖ from F. For two such factors
        ``(G ⊗ A + γI)⁻¹`` is positive definite, at most 1 / γ, and at most ``((1 + τ)² - 1) ‖G‖ ‖A‖ / γ²`` from the
        exact one.

        Args:
            matrices: ``[N, d, d]``; only the lower triangles are read.
            basis: ``[N, d, d]``, in columns, in any dtype; None: there is none.

        Returns:
            The same as `linalg.eigh`, with eigenvalues in any order. Cost in products of two d x d matrices: 1 for the
            test, about 0.8 for the first iteration and 1.5 for each later one. Synchronizes with the device once if
            all bases stay, and three times more per iteration.
        """
        if basis is None:
            return eigh(matrices)
        F, scale = rescale_(symmetric(matrices))
        values, vectors, passed = self._refine(F, _orthogonal(basis.to(F.dtype)))
        values = (values * scale).clamp_(min=0)
        fine = torch.ones(len(F), dtype=torch.bool, device=F.device)
        failed = [block for block, succeeded in enumerate(passed) if not succeeded]
        if failed:
            index = tensor_on(F.device, failed, torch.long)
            values[index], vectors[index], fine[index] = eigh(matrices[index])
        return values, vectors, fine

    def _refine(self, F: Tensor, Q: Tensor) -> tuple[Tensor, Tensor, list[bool]]:
        """Return eigenvalues, eigenvectors, and which blocks pass the test; other blocks hold no valid result."""
        limit = self.tolerance * torch.linalg.vector_norm(F, dim=(1, 2))
        Y = product(F, Q)
        values, residual = _rayleigh(Q, Y)
        orthogonal, stays = _is_orthogonal(Q), residual <= limit
        near = orthogonal & (residual <= limit * max(1.0, _GAIN * self.iterations))
        passed, turnable = torch.stack([orthogonal & stays, near]).tolist()  # synchronizes
        if all(passed) or not any(turnable) or self.iterations == 0:
            return values, Q.clone(), passed
        for share in (_FIRST, *[_LATER] * (self.iterations - 1)):
            left = [block for block in range(len(F)) if turnable[block] and not passed[block]]
            if not left:
                break
            index = tensor_on(F.device, left, torch.long)
            turned = _turn(Q[index], Y[index], values[index], max(1, F.shape[-1] // share))
            found, residual = _rayleigh(*turned)
            for block, succeeded in zip(left, (residual <= limit[index]).tolist(), strict=True):
                passed[block] = succeeded
            Q, Y, values = (
                old.index_copy(0, index, new) for old, new in zip((Q, Y, values), (*turned, found), strict=True)
            )
        # The next call takes the last vectors as the leading ones. Bases that passed at once keep their order.
        places = torch.arange(F.shape[-1], device=F.device)
        order = torch.where((orthogonal & stays)[:, None], places, values.argsort(-1))
        return values.take_along_dim(order, -1), Q.take_along_dim(order[:, None, :], -1), passed


def _rayleigh(Q: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Rayleigh quotients of ``Q [N, d, k]`` with ``Y = FQ``, and the norm of their residuals."""
    products = Q * Y
    values = products.sum(-2)
    residuals = torch.addcmul(Y, Q, values[:, None, :], value=-1, out=products)
    return values, torch.linalg.vector_norm(residuals, dim=(1, 2))


def _turn(Q: Tensor, Y: Tensor, values: Tensor, leading: int) -> tuple[Tensor, Tensor]:
    """Return a basis whose last vectors, `leading` in number, are nearer to eigenvectors, and Y = FQ for it.

    Args:
        Q: The basis ``[N, d, d]``, in about ascending order.
        Y: FQ.
        values: diag(QᵀFQ) ``[N, d]``.
        leading: The number of last vectors that are rotated until their Jacobi angles to the others vanish.
    """
    rest = Q.shape[-1] - leading
    B = product(Q.mT, Y[..., rest:])
    ritz, U = _eigh(B[:, rest:])
    twice = product(2 * B[:, :rest], U)
    gap = ritz[:, None, :] - values[:, :rest, None]
    root = (gap * gap).addcmul_(twice, twice).sqrt_()
    X = (twice / torch.where(gap < 0, gap - root, gap + root)).nan_to_num_(posinf=0.0, neginf=0.0)
    # The direct rotation of the leading vectors S and the rest R takes S to the span of S + R X:
    # S <- (S + R X) c and R <- R (I + X Xt)^(-1/2) - S c Xt with c = (I + Xt X)^(-1/2).
    squares, V = _eigh(product(X.mT, X))
    secant = (1 + squares).sqrt()[:, None, :]
    c, h = product(V / secant, V.mT), product(V / (secant * (1 + secant)), V.mT)
    c_of_S, turned = product(U, c), []
    for columns in (Q, Y):
        R, S = columns[..., :rest], columns[..., rest:]
        RX, Sc = product(R, X), product(S, c_of_S)
        turned.append(torch.cat([torch.baddbmm(R, torch.baddbmm(Sc, RX, h), X.mT, alpha=-1), Sc.baddbmm_(RX, c)], -1))
    return turned[0], turned[1]


def _eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors; NaN, which fails every test, where the decomposition failed."""
    values, vectors, fine = eigh(matrices)
    return values, vectors.masked_fill_(~fine[:, None, None], torch.nan)


def _is_orthogonal(Q: Tensor) -> Tensor:
    """Return which bases are orthogonal ``[N]``, tested by the product of QᵀQ with a vector of ones."""
    limit = _SKEW * torch.finfo(Q.dtype).eps * Q.shape[-1] ** 0.5
    error: Tensor = torch.linalg.vector_norm(product(Q.mT, Q.sum(-1, keepdim=True)) - 1, dim=(1, 2))
    return error.le(limit)


def _orthogonal(Q: Tensor) -> Tensor:
    """Return the bases; the nearest orthogonal ones of those that were rounded (Björck & Bowie 1971)."""
    orthogonal = _is_orthogonal(Q)
    if bool(orthogonal.all()):
        return Q
    R = Q
    for _ in range(3):  # an error e becomes 3/4 e²: three steps reduce bfloat16's 2⁻⁸ below float64's
        R = torch.baddbmm(R, R, product(R.mT, R), beta=1.5, alpha=-0.5)
    return torch.where(orthogonal[:, None, None], Q, R)
