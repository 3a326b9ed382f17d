"""Second moments of per-sample gradients in a Kronecker-factored basis."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from natgrad.curvature.sides import Side
from natgrad.layers import Rows
from natgrad.linalg.device import on_host

_HOST_PIECE, _ACCELERATOR_PIECE = 1 << 20, 1 << 24
"""About how many elements of rows and per-sample gradients are processed at once: to fit a cache, or to fill a GPU."""


def add_moments_(
    S: Tensor, inputs: Rows, gradients: Rows, A: Side, G: Side, computed: Mapping[str, Tensor], *, scale: float
) -> None:
    """Add `scale` Σ_n (Q_Gᵀ ∇_n Q_A)∘² to S, with ∇_n = Σ_t g aᵀ a sample's gradient (George et al. 2018).

    With one position per sample that is ((g Q_G)∘²)ᵀ (a Q_A)∘². With T positions each sample's gradient is formed
    before it is squared, and each side is rotated either before that (T d² multiply-adds) or after it (r d², with r the
    size of the other side), whichever is cheaper.

    Args:
        S: ``[n, o, i]``, one element per eigenvalue.
        inputs: The rows a.
        gradients: The rows g of the same samples.
        A: How the factor of the inputs is stored.
        G: How the factor of the outputs is stored.
        computed: Their eigenvectors.
        scale: The factor of the sum.
    """
    T = inputs.positions
    o, i = S.shape[1:]
    size = len(S) * (T * (o + i) + (o * i if T > 1 else 0))
    step = max(1, (_HOST_PIECE if on_host(S) else _ACCELERATOR_PIECE) // size)
    for start in range(0, inputs.samples, step):
        stop = min(start + step, inputs.samples)
        a_rows, g = inputs.part(start, stop), gradients.part(start, stop).dense().to(S.dtype)  # [n, B, T, d]
        if T == 1:
            a, g = A.rotate(a_rows.dense().to(S.dtype)[:, :, 0], computed, "A"), G.rotate(g[:, :, 0], computed, "G")
            S.baddbmm_(g.square().mT, a.square(), alpha=scale)
            continue
        rotate_a_first, rotate_g_first = o >= T, i >= T
        if rotate_g_first:
            g = _rotated(g, G, computed, "G")
        if rotate_a_first:
            gradient = g.mT @ _rotated(a_rows.dense().to(S.dtype), A, computed, "A")  # [n, B, o, i]
        else:
            gradient = _rotated(a_rows.outer(g), A, computed, "A")
        if not rotate_g_first:
            gradient = _rotated(gradient.mT, G, computed, "G").mT
        S.add_(gradient.square_().sum(1), alpha=scale)


def _rotated(rows: Tensor, side: Side, computed: Mapping[str, Tensor], name: str) -> Tensor:
    """Return ``rows [n, B, r, d]`` in the eigenbasis of a side."""
    rotated: Tensor = side.rotate(rows.flatten(1, 2), computed, name).unflatten(1, rows.shape[1:3])
    return rotated
