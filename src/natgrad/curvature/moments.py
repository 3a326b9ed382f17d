"""Second moments of per-sample gradients in a Kronecker-factored basis."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from natgrad.curvature.sides import Side
from natgrad.layers import Rows
from natgrad.linalg.device import by_device

_HOST_PIECE, _ACCELERATOR_PIECE = 1 << 20, 1 << 24
"""About how many elements of rows and per-sample gradients exist at once: what caches hold, and what fills a GPU."""


def add_moments_(
    S: Tensor, inputs: Rows, gradients: Rows, A: Side, G: Side, computed: Mapping[str, Tensor], *, scale: float
) -> None:
    """Add `scale` Σ_n (Q_Gᵀ ∇_n Q_A)∘² to S, with ∇_n = Σ_t g aᵀ a sample's gradient (George et al. 2018).

    With one position a sample it is ((g Q_G)∘²)ᵀ (a Q_A)∘², two rotations and one product of all rows. With T positions
    each sample's gradient is formed before it is squared; either side is rotated before that, at T d² multiply-adds, or
    after it, at r d² with r the length of the other side, whichever is less.

    Args:
        S: ``[n, o, i]``, as many as there are eigenvalues.
        inputs: The rows a.
        gradients: The rows g of the same samples.
        A: The kind of side of the inputs.
        G: That of the outputs.
        computed: Their eigenvectors.
        scale: What to multiply by.
    """
    T = inputs.positions
    o, i = S.shape[1:]
    size = len(S) * (T * (o + i) + (o * i if T > 1 else 0))
    step = max(1, by_device(S, host=_HOST_PIECE, accelerator=_ACCELERATOR_PIECE) // size)
    for start in range(0, inputs.samples, step):
        stop = min(start + step, inputs.samples)
        some, g = inputs.part(start, stop), gradients.part(start, stop).dense().to(S.dtype)  # [n, B, T, d]
        if T == 1:
            a, g = A.rotate(some.dense().to(S.dtype)[:, :, 0], computed, "A"), G.rotate(g[:, :, 0], computed, "G")
            S.baddbmm_(g.square().mT, a.square(), alpha=scale)
            continue
        early_a, early_g = o >= T, i >= T
        if early_g:
            g = _rotated(g, G, computed, "G")
        if early_a:
            gradient = g.mT @ _rotated(some.dense().to(S.dtype), A, computed, "A")  # [n, B, o, i]
        else:
            gradient = _rotated(some.outer(g), A, computed, "A")
        if not early_g:
            gradient = _rotated(gradient.mT, G, computed, "G").mT
        S.add_(gradient.square_().sum(1), alpha=scale)


def _rotated(rows: Tensor, side: Side, computed: Mapping[str, Tensor], name: str) -> Tensor:
    """Return ``rows [n, B, r, d]`` in the coordinates of a side."""
    rotated: Tensor = side.rotate(rows.flatten(1, 2), computed, name).unflatten(1, rows.shape[1:3])
    return rotated
