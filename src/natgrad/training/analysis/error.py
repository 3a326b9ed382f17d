"""The error of KID's and KIS's directions against exact SNGD by rank (HyLo, Mu 2022, figure 12)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

from natgrad.curvature import kernel

METHODS = ("kid", "kis")
DRAWS = 8
"""The number of draws of KIS, whose errors vary."""


@dataclass(frozen=True, kw_only=True)
class DirectionError:
    """The error of an approximate direction of one layer, ``‖ĝ - g‖ / ‖g‖``.

    Attributes:
        step: Optimizer steps before.
        layer: The layer's name.
        method: "kid" or "kis".
        rank: r, the number of selected rows.
        batch_size: m, the number of all rows.
        damping: α of the direction.
        error: The error, for KIS the mean over its draws.
        least: The smallest error of the draws.
        greatest: The largest error of the draws.
    """

    step: int
    layer: str
    method: Literal["kid", "kis"]
    rank: int
    batch_size: int
    damping: float
    error: float
    least: float
    greatest: float


def exact(A: Tensor, G: Tensor, W: Tensor, damping: float) -> Tensor:
    """Return the SNGD direction ``(UᵀU / m + αI)⁻¹ W`` (eq. 7, corrected) ``[n, o, i]``.

    Args:
        A: Rows of inputs ``[n, m, i]``.
        G: Rows of output gradients ``[n, m, o]``.
        W: The gradient ``[n, o, i]``.
        damping: α.
    """
    rows = A.shape[1]
    M, _ = kernel.inverted(A, G, None, samples=rows, damping=damping)
    return kernel.precondition(A, G, M, W, samples=rows, damping=damping)


def approximate(
    method: str, A: Tensor, G: Tensor, W: Tensor, rank: int, damping: float, generator: torch.Generator | None = None
) -> Tensor:
    """Return the direction of KID or KIS with `rank` rows, on one worker, shaped like that of `exact`."""
    rows = A.shape[1]
    if method == "kid":
        chosen = kernel.interpolate(A, G, rank, samples=rows, damping=damping)
    else:
        starts = torch.rand(len(A), generator=generator, dtype=torch.float64)
        chosen = kernel.sample(A, G, rank, starts=starts)
    Y = None if chosen.Y is None else chosen.Y[:, None]
    M, _ = kernel.inverted(chosen.A, chosen.G, Y, samples=rows, damping=damping)
    return kernel.precondition(chosen.A, chosen.G, M, W, samples=rows, damping=damping)


def errors(
    step: int, layer: str, A: Tensor, G: Tensor, W: Tensor, ranks: Iterable[int], damping: float, *, seed: int = 0
) -> list[DirectionError]:
    """Measure both methods at several ranks, in float64.

    Args:
        step: Optimizer steps before.
        layer: The layer's name.
        A: Rows of inputs ``[n, m, i]``.
        G: Rows of output gradients ``[n, m, o]``.
        W: The gradient ``[n, o, i]``.
        ranks: The ranks r >= 1; those beyond m count as m.
        damping: α.
        seed: The seed of the draws of KIS.

    Returns:
        An entry for each method and rank; none if the gradient is zero or an argument is not finite.
    """
    A, G, W = A.double(), G.double(), W.double()
    rows = A.shape[1]
    if not all(bool(tensor.isfinite().all()) for tensor in (A, G, W)) or not bool(W.any()):
        return []
    right = exact(A, G, W, damping)
    generator, found = torch.Generator().manual_seed(seed), []
    for rank in sorted({min(count, rows) for count in ranks}):
        for method in METHODS:
            drawn = [
                float((approximate(method, A, G, W, rank, damping, generator) - right).norm() / right.norm())
                for _ in range(DRAWS if method == "kis" else 1)
            ]
            found.append(
                DirectionError(
                    step=step,
                    layer=layer,
                    method=method,  # type: ignore[arg-type]  # one of METHODS
                    rank=rank,
                    batch_size=rows,
                    damping=damping,
                    error=fmean(drawn),
                    least=min(drawn),
                    greatest=max(drawn),
                )
            )
    return found
