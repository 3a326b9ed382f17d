"""Eigenbases and inverses that begin with those of the last renewal, and are brought forward by products of matrices.

Running averages move little between two renewals, so that the last result is nearly the next one. What it is worth is
tested first, on the residual itself; only what fails the test is worked on, and only what that does not help is made
from scratch. Shapes: ``N`` blocks of size ``d``; norms are Frobenius's.
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

# An iteration turns one in so many eigenvectors, the first and those after it; and divides the residual by so much, as
# a rule.
_FIRST, _LATER = 8, 4
_GAIN = 4.0
# On a CPU, a test that fails may take more than a tenth of decomposing matrices below the first size, and fewer than so
# many below the second; and an iteration takes longer than decomposing any of those.
_SMALL, _MIDDLE, _MANY = 256, 320, 8
# On a GPU it is calls that take the time, and those of an iteration more than a decomposition of all matrices of up to
# so many columns, or of so few matrices that they have up to so many together (`natgrad.linalg.cusolver`).
_FEW, _TOGETHER = 256, 512
_ALONE = 1  # how often a single matrix is turned there in less time
# Where a test of all vectors takes far longer than one of the leading ones, one in so many, which come first there.
_STEPWISE, _TESTED = ("cpu",), 16
# A residual of the leading vectors, in tolerances, beyond which it takes two iterations as a rule: that is as long as a
# decomposition takes there.
_LEADING = 3.0
# Norms from which on squares are not exact enough in float32: 1e-10 of the largest entry is not missed.
_TINY = 1e-10
# How far from orthogonal a basis may be, in units of the rounding of its dtype; LAPACK's are at about 10.
_SKEW = 1000.0
# Rounding to bfloat16 moves vectors by at most 2⁻⁹ of their length: what is left of F beyond so much is not for that.
_ROUNDED = 2.0**-5


@dataclass(frozen=True, kw_only=True)
class Warm:
    """How renewals begin with the last result.

    Attributes:
        tolerance: The relative residual at which a result is good enough.
        iterations: The most iterations before it is made from scratch.

    Raises:
        ValueError: unless `tolerance` is a number in (0, 1) and `iterations` a whole number >= 0.
    """

    tolerance: float
    iterations: int

    def __post_init__(self) -> None:
        """Check the numbers."""
        number = isinstance(self.tolerance, float) and 0 < self.tolerance < 1
        require(number, "tolerance", self.tolerance, "a number in (0, 1)")
        whole = isinstance(self.iterations, int) and not isinstance(self.iterations, bool)
        require(whole and self.iterations >= 0, "iterations", self.iterations, "a whole number >= 0")

    def eigh(self, matrices: Tensor, basis: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Decompose symmetric positive semi-definite matrices F, beginning with the eigenvectors Q of others.

        With D = diag(QᵀFQ), what is off the diagonal of QᵀFQ has the norm of the residual ``FQ - QD``, which is taken
        as it stands: a difference of squared norms would cancel. At `tolerance` times ‖F‖ or less, the basis stays and
        D are the eigenvalues. Otherwise the leading quarter of the basis is turned up to `iterations` times: by a
        Rayleigh-Ritz step within it, then out of it by the angle that diagonalises F on each pair of vectors alone
        (Jacobi 1846), at most 45 degrees, all of them together as the one orthogonal map that moves a subspace least,
        the direct rotation (Davis & Kahan 1970, section 4). What still fails the test, or is too far beyond it from
        the start, is left to `linalg.eigh`; so are, on a CPU, matrices so small that it decomposes them in no more
        time, and, there and on a GPU, those whose basis does not stay where that is so of an iteration.

        So ``QDQᵀ`` is always positive semi-definite, and never farther from F than τ‖F‖, τ being the tolerance. Of two
        such factors, ``(G ⊗ A + γI)⁻¹`` is positive definite, at most 1 / γ, and no farther from the exact one than
        ``((1 + τ)² - 1) ‖G‖ ‖A‖ / γ²``.

        Args:
            matrices: ``[N, d, d]``; only the lower triangles are read.
            basis: ``[N, d, d]``, in columns, in any dtype; None: there is none.

        Returns:
            What `linalg.eigh` does, the eigenvalues in any order. Cost in products of two d x d matrices: 1 for the
            test, about 0.8 for the first iteration and 1.5 for each that follows. The host waits for the device once
            where all bases stay, and three times more in each iteration.
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
        failed = [block for block, each in enumerate(passed) if not each]
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
        """Return eigenvalues, vectors, and which blocks pass the test; of the others nothing means anything.

        None: none passes it.

        Args:
            F: ``[N, d, d]``.
            norm: Of each ``[N]``.
            Q: The bases.
            rounded: Whether those that are not orthogonal may be so for they were rounded.
        """
        limit = self.tolerance * norm
        most = _turns(F.device, len(F), F.shape[-1], self.iterations)
        reach = limit * max(1.0, _GAIN * most)
        leading = limit * (_LEADING if most else 1.0)
        tested = _tested(F, Q, leading, torch.hypot(leading, _ROUNDED * norm) if rounded else leading)
        if tested is None:
            return None
        pieces, values, residual, beyond = tested
        straight = _is_straight(Q)
        near = straight & (residual <= reach) & (beyond <= leading)
        tests = torch.stack([straight, straight & (residual <= limit), near])
        orthogonal, passed, turnable = tests.tolist()  # the host waits
        if rounded and not all(orthogonal):
            return self._refined(F, norm, torch.where(straight[:, None, None], Q, _straightened(Q)), rounded=False)
        if all(passed) or not any(turnable) or most == 0:
            return values, Q, passed
        Y = torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0]
        for share in (_FIRST, *[_LATER] * (most - 1)):
            left = [block for block in range(len(F)) if turnable[block] and not passed[block]]
            if not left:
                break
            whole, index = len(left) == len(F), tensor_on(F.device, left, torch.long)
            old = (Q, Y, values) if whole else (Q[index], Y[index], values[index])
            turned = _turn(*old, max(1, F.shape[-1] // share))
            found, residual = _rayleigh(*turned)
            for block, each in zip(left, (residual <= limit[index]).tolist(), strict=True):
                passed[block] = each
            Q, Y, values = (
                new if whole else every.index_copy(0, index, new)
                for every, new in zip((Q, Y, values), (*turned, found), strict=True)
            )
        # The next turn takes the last vectors for the leading ones. What stayed is left as it was.
        stayed, places = tests[1, :, None], torch.arange(F.shape[-1], device=F.device)
        order = torch.where(stayed, places, values.argsort(-1))
        return values.take_along_dim(order, -1), Q.take_along_dim(order[:, None, :], -1), passed

    def damped_inverse(self, matrices: Tensor, damping: Tensor, inverses: Tensor | None) -> tuple[Tensor, Tensor]:
        """Invert F = ``matrices + damping I`` by Newton's iteration, beginning with the inverses of others.

        X ← X (2I - FX) squares the residual ``I - FX`` (Schulz 1933). It begins with the last inverse, times the
        number that makes its residual least, where that is below 1, and else with the multiple of the identity whose
        residual is sure to be. The first residual tells how many iterations it takes to get to `tolerance`; what takes
        more than `iterations`, or fails the test at the end, is left to `linalg.damped_inverse`.

        So X is never farther from F⁻¹ than `tolerance` times its norm: ``F⁻¹ - X = F⁻¹ (I - FX)``.

        Args:
            matrices: ``[N, d, d]`` symmetric positive semi-definite; only the lower triangles are read.
            damping: ``[N]``.
            inverses: ``[N, d, d]``, in any dtype; None: there are none.

        Returns:
            What `linalg.damped_inverse` does. Cost in products of two d x d matrices: 1 for the test before, 2 for
            each iteration, 1 for the test after them. The host waits for the device twice.
        """
        F = symmetric(matrices)
        F.diagonal(dim1=-2, dim2=-1).add_(damping[:, None])
        X, error = _start(F, damping, None if inverses is None else inverses.to(F.dtype))
        counts = [self._count(value, F.shape[-1]) for value in error.tolist()]
        fine = torch.ones(len(F), dtype=torch.bool, device=F.device)
        for count in sorted(set(counts) - {0}):
            index = tensor_on(F.device, [block for block, own in enumerate(counts) if own == count], torch.long)
            if count > self.iterations:
                fine[index] = False
                continue
            own, x = F[index], X[index]
            for _ in range(count):
                x = torch.baddbmm(x, x, product(own, x), beta=2, alpha=-1)
            X[index], fine[index] = (x + x.mT) / 2, _distance(product(own, x), 1.0) <= self.tolerance
        if not bool(fine.all()):
            index = (~fine).nonzero().flatten()
            X[index], fine[index] = damped_inverse(matrices[index], damping[index])
        return X, fine

    def _count(self, error: float, size: int) -> int:
        """Return how many squarings bring a residual well below the tolerance; one more than allowed: none do."""
        if error <= self.tolerance:
            return 0
        goal = self.tolerance / (2 * size**0.5)  # of the largest eigenvalue, which may be what is known
        return ceil(log2(max(1.0, log(goal) / log(error)))) or 1 if error < 1 else self.iterations + 1


def _tests(device: torch.device, count: int, size: int) -> bool:
    """Return whether a test costs little beside decomposing its matrices from scratch."""
    return not on_host(device) or size >= (_SMALL if count >= _MANY else _MIDDLE)


def _turns(device: torch.device, count: int, size: int, allowed: int) -> int:
    """Return how often matrices may be turned in less time than decomposing them from scratch takes."""
    if on_host(device):
        return allowed if size >= _MIDDLE else 0
    if size <= _FEW or count * size <= _TOGETHER:
        return 0
    return min(allowed, _ALONE) if count == 1 else allowed


def _tested(F: Tensor, Q: Tensor, reach: Tensor, far: Tensor) -> tuple[list[Tensor], Tensor, Tensor, Tensor] | None:
    """Return FQ in pieces that follow each other, the Rayleigh quotients, and the norms of residuals ``[N]``.

    These are of all vectors, and of the leading ones, if they come first; if not, 0.

    Args:
        F: ``[N, d, d]``.
        Q: The bases.
        reach: What the residual of the leading vectors may be ``[N]``.
        far: What it may be where it is rounding that leaves a basis not orthogonal ``[N]``.

    Returns:
        None where the leading vectors, if they come first, are beyond that in every block.
    """
    size = F.shape[-1]
    if F.device.type not in _STEPWISE:
        Y = product(F, Q)
        return [Y], *_rayleigh(Q, Y), torch.zeros_like(reach)
    rest = size - max(1, size // _TESTED)
    leading, others = Q[..., rest:], Q[..., :rest]
    last = product(F, leading)
    last_values, beyond = _rayleigh(leading, last)
    lost = beyond > far  # mostly all of them are, or none: then nobody asks whether they are orthogonal
    if bool(lost.all()) or (bool((beyond > reach).all()) and bool((lost | _is_straight(leading)).all())):
        return None
    first = product(F, others)
    values, residual = _rayleigh(others, first)
    return [first, last], torch.cat([values, last_values], -1), torch.hypot(residual, beyond), beyond


def _rayleigh(Q: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Rayleigh quotients of vectors ``Q [N, d, k]`` where ``Y = FQ``, and the norm of their residuals."""
    products = Q * Y
    values = products.sum(-2)
    residuals = torch.addcmul(Y, Q, values[:, None, :], value=-1, out=products)
    return values, torch.linalg.vector_norm(residuals, dim=(1, 2))


def _scaled(F: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return blocks whose entries have squares, their norms ``[N]``, and their divisors ``[N, 1]``, if any."""
    norm: Tensor = torch.linalg.vector_norm(F, dim=(1, 2))
    if on_host(F) and all(_TINY < each < 1 / _TINY for each in norm.tolist()):
        return F, norm, None
    scale = F.diagonal(dim1=-2, dim2=-1).amax(-1)  # no entry is larger; the squares of 1e-25 would be 0
    scale = torch.where(scale > 0, scale, 1)[:, None]
    F /= scale[:, :, None]
    return F, torch.linalg.vector_norm(F, dim=(1, 2)), scale


def _turn(Q: Tensor, Y: Tensor, values: Tensor, leading: int) -> tuple[Tensor, Tensor]:
    """Return a basis whose last vectors, `leading` in number, are nearer to eigenvectors, and Y = FQ for it.

    Args:
        Q: The basis ``[N, d, d]``, in about ascending order.
        Y: FQ.
        values: diag(QᵀFQ) ``[N, d]``.
        leading: How many of the last vectors are brought to where the Jacobi angles to the others vanish.
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
    for each in (Q, Y):
        R, S = each[..., :rest], each[..., rest:]
        RX, Sc = product(R, X), product(S, c_of_S)
        turned.append(torch.cat([torch.baddbmm(R, torch.baddbmm(Sc, RX, h), X.mT, alpha=-1), Sc.baddbmm_(RX, c)], -1))
    return turned[0], turned[1]


def _eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and vectors; NaN, which no test lets pass, where there are none."""
    values, vectors, fine = eigh(matrices)
    return values, vectors.masked_fill_(~fine[:, None, None], torch.nan)


def _is_straight(Q: Tensor) -> Tensor:
    """Tell which bases are orthogonal ``[N]``, by what QᵀQ does to the vector of ones."""
    limit = _SKEW * torch.finfo(Q.dtype).eps * Q.shape[-1] ** 0.5
    error: Tensor = torch.linalg.vector_norm(product(Q.mT, Q.sum(-1, keepdim=True)) - 1, dim=(1, 2))
    return error.le(limit)


def _straightened(Q: Tensor) -> Tensor:
    """Return the nearest orthogonal bases of those that were rounded, by Newton's iteration (Björck & Bowie 1971)."""
    for _ in range(3):  # an error e becomes 3/4 e²: 2⁻⁸, that of bfloat16, is gone even in float64
        Q = torch.baddbmm(Q, Q, product(Q.mT, Q), beta=1.5, alpha=-0.5)
    return Q


def _start(F: Tensor, damping: Tensor, inverses: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what Newton's iteration begins with, and the norm of its residual I - FX: an upper bound, below 1."""
    bound = F.abs().sum(-1).amax(-1)  # no eigenvalue is larger, and by what F is none is below the damping
    X = torch.diag_embed((2 / (bound + damping))[:, None].expand(F.shape[:2]))
    error = (bound - damping) / (bound + damping)
    if inverses is None:
        return X, error
    made = product(F, inverses)
    share = made.diagonal(dim1=-2, dim2=-1).sum(-1) / made.square().sum((1, 2))
    warm = _distance(made, share)
    nearer = warm < error
    return torch.where(nearer[:, None, None], inverses * share[:, None, None], X), torch.where(nearer, warm, error)


def _distance(made: Tensor, share: Tensor | float) -> Tensor:
    """Return ‖share · made - I‖ ``[N]``, having overwritten `made`."""
    made = made.mul_(share[:, None, None] if isinstance(share, Tensor) else share)
    made.diagonal(dim1=-2, dim2=-1).sub_(1)
    distance: Tensor = torch.linalg.vector_norm(made, dim=(1, 2))
    return distance
