"""Eigendecompositions and inverses that start from the last result and improve it by matrix products.

Running averages change little between two refreshes, so that the last result is nearly the next one. Its residual is
computed first; blocks that fail the test are iterated, and blocks that still fail are decomposed from scratch. Shapes:
N blocks of size d. Norms are Frobenius norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log, log2

import torch
from torch import Tensor

from natgrad.errors import require
from natgrad.linalg import damped_inverse, eigh, product, tensor_on
from natgrad.linalg.device import on_host
from natgrad.linalg.lapack import symmetric
from natgrad.schedule import check_whole

# The first iteration rotates one in _FIRST eigenvectors, later ones one in _LATER; each typically divides the residual
# by _GAIN.
_FIRST, _LATER = 8, 4
_GAIN = 4.0
# On a CPU a test costs more than a tenth of a decomposition for matrices below _SMALL, and for fewer than _MANY
# matrices below _MIDDLE. An iteration costs more than a decomposition below _MIDDLE.
_SMALL, _MIDDLE, _MANY = 256, 320, 8
# On a GPU an iteration costs more than a decomposition of matrices of up to _FEW columns, or of matrices with up to
# _TOGETHER columns in all (`natgrad.linalg.cusolver`).
_FEW, _TOGETHER = 256, 512
_ALONE = 1  # the number of iterations of a single matrix that is faster there than a decomposition
# On a CPU the leading vectors, one in _TESTED, are tested first, which is much cheaper than testing all.
_TESTED = 16
# The residual of the leading vectors, in tolerances, from which on two iterations are needed, which cost as much as a
# decomposition there.
_LEADING = 3.0
# Blocks with norms below this, or above its inverse, are scaled, because their squares are inexact in float32.
_TINY = 1e-10
# The allowed deviation of a basis from orthogonality, in units of the rounding of its dtype; LAPACK's have about 10.
_SKEW = 1000.0
# The largest relative residual that rounding a basis to bfloat16 can explain (vectors move by at most 2⁻⁹).
_ROUNDED = 2.0**-5


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
        """Check the numbers."""
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
        that still fail the test or are too far from it at the start, and sizes for which it is faster.

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
        if basis is None or not _tests(matrices.device, *matrices.shape[:2]):
            return eigh(matrices)
        F, norm, scale = _scaled(symmetric(matrices))
        refined = self._refined(F, norm, basis.to(F.dtype))
        if refined is None:
            return eigh(matrices)
        values, vectors, passed = refined
        values = (values if scale is None else values * scale).clamp_(min=0)
        fine = torch.ones(len(F), dtype=torch.bool, device=F.device)
        failed = [block for block, succeeded in enumerate(passed) if not succeeded]
        if not failed:
            return values, vectors, fine
        if len(failed) == len(F):
            return eigh(matrices)
        index = tensor_on(F.device, failed, torch.long)
        exact = eigh(matrices[index])
        return tuple(old.index_copy(0, index, new) for old, new in zip((values, vectors, fine), exact, strict=True))  # type: ignore[return-value]

    def _refined(
        self, F: Tensor, norm: Tensor, Q: Tensor, *, rounded: bool = True
    ) -> tuple[Tensor, Tensor, list[bool]] | None:
        """Return eigenvalues, eigenvectors, and which blocks pass the test; other blocks hold no valid result.

        None if no block passes. `rounded`: bases that are not orthogonal are orthogonalised and tested again.
        """
        limit = self.tolerance * norm
        most = _turns(F.device, len(F), F.shape[-1], self.iterations)
        reach = limit * max(1.0, _GAIN * most)
        leading = limit * (_LEADING if most else 1.0)
        tested = _tested(F, Q, leading, torch.hypot(leading, _ROUNDED * norm) if rounded else leading)
        if tested is None:
            return None
        pieces, values, residual, beyond = tested
        orthogonal_mask = _is_orthogonal(Q)
        near = orthogonal_mask & (residual <= reach) & (beyond <= leading)
        tests = torch.stack([orthogonal_mask, orthogonal_mask & (residual <= limit), near])
        orthogonal, passed, turnable = tests.tolist()  # synchronizes
        if rounded and not all(orthogonal):
            return self._refined(
                F, norm, torch.where(orthogonal_mask[:, None, None], Q, _orthogonalised(Q)), rounded=False
            )
        if all(passed) or not any(turnable) or most == 0:
            return values, Q, passed
        Y = torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0]
        for share in (_FIRST, *[_LATER] * (most - 1)):
            left = [block for block in range(len(F)) if turnable[block] and not passed[block]]
            if not left:
                break
            whole, index = len(left) == len(F), tensor_on(F.device, left, torch.long)
            part = (Q, Y, values) if whole else (Q[index], Y[index], values[index])
            turned = _turn(*part, max(1, F.shape[-1] // share))
            found, residual = _rayleigh(*turned)
            for block, succeeded in zip(left, (residual <= limit[index]).tolist(), strict=True):
                passed[block] = succeeded
            Q, Y, values = (
                new if whole else old.index_copy(0, index, new)
                for old, new in zip((Q, Y, values), (*turned, found), strict=True)
            )
        # The next call takes the last vectors as the leading ones. Bases that passed at once keep their order.
        stayed, places = tests[1, :, None], torch.arange(F.shape[-1], device=F.device)
        order = torch.where(stayed, places, values.argsort(-1))
        return values.take_along_dim(order, -1), Q.take_along_dim(order[:, None, :], -1), passed

    def damped_inverse(self, matrices: Tensor, damping: Tensor, inverses: Tensor | None) -> tuple[Tensor, Tensor]:
        """Invert F = ``matrices + damping I`` by Newton's iteration, starting from the inverses of similar matrices.

        X ← X (2I - FX) squares the residual ``I - FX`` (Schulz 1933). It starts from the last inverse, scaled to the
        least residual, or, if that residual is not smaller, from a multiple of the identity with a residual below 1.
        The number of iterations follows from the first residual. `linalg.damped_inverse` inverts blocks that need more
        than `iterations`, or fail the test at the end.

        The error of X is at most `tolerance` ‖F⁻¹‖, because ``F⁻¹ - X = F⁻¹ (I - FX)``.

        Args:
            matrices: ``[N, d, d]`` symmetric positive semi-definite; only the lower triangles are read.
            damping: ``[N]``.
            inverses: ``[N, d, d]``, in any dtype; None: there are none.

        Returns:
            The same as `linalg.damped_inverse`. Cost in products of two d x d matrices: 2 for the tests, 2 for each
            iteration. Synchronizes with the device twice.
        """
        F = symmetric(matrices)
        F.diagonal(dim1=-2, dim2=-1).add_(damping[:, None])
        X, error = _start(F, damping, None if inverses is None else inverses.to(F.dtype))
        counts = [self._count(value, F.shape[-1]) for value in error.tolist()]
        fine = torch.ones(len(F), dtype=torch.bool, device=F.device)
        for count in sorted(set(counts) - {0}):
            index = tensor_on(F.device, [block for block, needed in enumerate(counts) if needed == count], torch.long)
            if count > self.iterations:
                fine[index] = False
                continue
            f, x = F[index], X[index]
            for _ in range(count):
                x = torch.baddbmm(x, x, product(f, x), beta=2, alpha=-1)
            X[index], fine[index] = (x + x.mT) / 2, _distance(product(f, x), 1.0) <= self.tolerance
        if not bool(fine.all()):
            index = (~fine).nonzero().flatten()
            X[index], fine[index] = damped_inverse(matrices[index], damping[index])
        return X, fine

    def _count(self, error: float, size: int) -> int:
        """Return how many squarings bring a residual well below the tolerance; more than `iterations` if none do."""
        if error <= self.tolerance:
            return 0
        goal = self.tolerance / (2 * size**0.5)  # `error` may be a bound on the largest eigenvalue of the residual
        return ceil(log2(max(1.0, log(goal) / log(error)))) or 1 if error < 1 else self.iterations + 1


def _tests(device: torch.device, count: int, size: int) -> bool:
    """Return whether a test is much cheaper than a decomposition from scratch."""
    return not on_host(device) or size >= (_SMALL if count >= _MANY else _MIDDLE)


def _turns(device: torch.device, count: int, size: int, allowed: int) -> int:
    """Return the number of iterations that are faster than a decomposition from scratch."""
    if on_host(device):
        return allowed if size >= _MIDDLE else 0
    if size <= _FEW or count * size <= _TOGETHER:
        return 0
    return min(allowed, _ALONE) if count == 1 else allowed


def _tested(F: Tensor, Q: Tensor, reach: Tensor, far: Tensor) -> tuple[list[Tensor], Tensor, Tensor, Tensor] | None:
    """Return FQ in parts, the Rayleigh quotients, and the norms of two residuals ``[N]``.

    The residuals are of all vectors, and of the leading ones if those are tested first, otherwise 0. None if the
    leading vectors fail in every block.

    Args:
        F: ``[N, d, d]``.
        Q: The bases.
        reach: The allowed residual of the leading vectors ``[N]``.
        far: The allowed residual for bases that are not orthogonal because of rounding ``[N]``.
    """
    size = F.shape[-1]
    if not on_host(F):
        Y = product(F, Q)
        return [Y], *_rayleigh(Q, Y), torch.zeros_like(reach)
    rest = size - max(1, size // _TESTED)
    leading, others = Q[..., rest:], Q[..., :rest]
    last = product(F, leading)
    last_values, beyond = _rayleigh(leading, last)
    lost = beyond > far  # usually all or none, which saves the test of orthogonality
    if bool(lost.all()) or (bool((beyond > reach).all()) and bool((lost | _is_orthogonal(leading)).all())):
        return None
    first = product(F, others)
    values, residual = _rayleigh(others, first)
    return [first, last], torch.cat([values, last_values], -1), torch.hypot(residual, beyond), beyond


def _rayleigh(Q: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Rayleigh quotients of ``Q [N, d, k]`` with ``Y = FQ``, and the norm of their residuals."""
    products = Q * Y
    values = products.sum(-2)
    residuals = torch.addcmul(Y, Q, values[:, None, :], value=-1, out=products)
    return values, torch.linalg.vector_norm(residuals, dim=(1, 2))


def _scaled(F: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return F scaled so that squares of entries are exact, the norms ``[N]``, and the divisors ``[N, 1]`` or None."""
    norm: Tensor = torch.linalg.vector_norm(F, dim=(1, 2))
    if on_host(F) and all(_TINY < value < 1 / _TINY for value in norm.tolist()):
        return F, norm, None
    scale = F.diagonal(dim1=-2, dim2=-1).amax(-1)  # no entry is larger
    scale = torch.where(scale > 0, scale, 1)[:, None]
    F /= scale[:, :, None]
    return F, torch.linalg.vector_norm(F, dim=(1, 2)), scale


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


def _orthogonalised(Q: Tensor) -> Tensor:
    """Return the nearest orthogonal bases of rounded ones, by Newton's iteration (Björck & Bowie 1971)."""
    for _ in range(3):  # an error e becomes 3/4 e²: three steps reduce bfloat16's 2⁻⁸ below float64's
        Q = torch.baddbmm(Q, Q, product(Q.mT, Q), beta=1.5, alpha=-0.5)
    return Q


def _start(F: Tensor, damping: Tensor, inverses: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the start X of Newton's iteration, and an upper bound below 1 on the norm of its residual I - FX."""
    bound = F.abs().sum(-1).amax(-1)  # no eigenvalue is larger than this, or smaller than the damping
    X = torch.diag_embed((2 / (bound + damping))[:, None].expand(F.shape[:2]))
    error = (bound - damping) / (bound + damping)
    if inverses is None:
        return X, error
    products = product(F, inverses)
    share = products.diagonal(dim1=-2, dim2=-1).sum(-1) / products.square().sum((1, 2))
    warm = _distance(products, share)
    nearer = warm < error
    return torch.where(nearer[:, None, None], inverses * share[:, None, None], X), torch.where(nearer, warm, error)


def _distance(products: Tensor, share: Tensor | float) -> Tensor:
    """Return ‖share · products - I‖ ``[N]``, overwriting `products`."""
    products = products.mul_(share[:, None, None] if isinstance(share, Tensor) else share)
    products.diagonal(dim1=-2, dim2=-1).sub_(1)
    distance: Tensor = torch.linalg.vector_norm(products, dim=(1, 2))
    return distance
