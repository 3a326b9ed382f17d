"""The bare calls of BLAS and LAPACK that a refresh of each curvature needs, on the rows of a network's layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.shapes import NETWORKS, Layers

Rows = list[tuple[Tensor, Tensor]]


def _rows(network: str, samples: int) -> Rows:
    return Layers(NETWORKS[network](), samples).rows


def _factors(rows: Rows) -> list[Tensor]:
    """Return the factors of all layers, damped so that each has an inverse."""
    matrices = [X.mT @ X / len(X) for pair in rows for X in pair]
    return [matrix + 0.1 * torch.eye(len(matrix)) for matrix in matrices]


def eigen(network: str, samples: int) -> Callable[[], None]:
    """Return what makes both factors of each layer, and decomposes them."""
    rows = _rows(network, samples)
    factors = _factors(rows)

    def run() -> None:
        for pair in rows:
            for X in pair:
                torch.mm(X.mT, X)
        for factor in factors:
            torch.linalg.eigh(factor)

    return run


def inverse(network: str, samples: int) -> Callable[[], None]:
    """Return what makes both factors of each layer, and inverts them by Cholesky."""
    rows = _rows(network, samples)
    factors = _factors(rows)

    def run() -> None:
        for pair in rows:
            for X in pair:
                torch.mm(X.mT, X)
        for factor in factors:
            torch.cholesky_inverse(torch.linalg.cholesky_ex(factor).L)

    return run


LIMITS: dict[str, Callable[[str, int], Callable[[], None]]] = {"KFAC eigen": eigen, "KFAC inverse": inverse}
