"""The bare calls of BLAS and LAPACK that a refresh of each curvature needs, on the rows of a network's layers.

Warm renewals count as if their test passed: the rows of the benchmark are the same at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.shapes import NETWORKS, Layers


@dataclass
class Layer:
    """The matrices of a layer: rows ``X_A [m, i]`` and ``X_G [m, o]``, and r of them.

    Attributes:
        rows: All rows.
        chosen: How many are chosen (HyLo).
    """

    rows: tuple[Tensor, Tensor]
    chosen: int

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        """Damped factors, which have inverses."""
        A, G = (X.mT @ X / len(X) + 0.1 * torch.eye(X.shape[1], device=X.device) for X in self.rows)
        return A, G

    @cached_property
    def kernel(self) -> Tensor:
        """The damped kernel ``[m, m]``."""
        kernel = self.gram(len(self.rows[0]))
        return kernel + 0.1 * torch.eye(len(kernel), device=kernel.device)

    def gram(self, count: int) -> Tensor:
        """Return the kernel of the first `count` rows."""
        A, G = (X[:count] for X in self.rows)
        return (A @ A.mT) * (G @ G.mT)

    def sums(self) -> None:
        """XᵀX of both sides."""
        for X in self.rows:
            torch.mm(X.mT, X)


def eigen(layer: Layer) -> None:
    """Make both factors and decompose them."""
    layer.sums()
    for factor in layer.factors:
        torch.linalg.eigh(factor)


def inverse(layer: Layer) -> None:
    """Make both factors and invert them."""
    layer.sums()
    for factor in layer.factors:
        _invert(factor)


def inputs(layer: Layer) -> None:
    """Make and invert A alone."""
    torch.mm(layer.rows[0].mT, layer.rows[0])
    _invert(layer.factors[0])


def iterative(layer: Layer) -> None:
    """Make both factors, and multiply them by the last basis, of whose product the test takes norms alone."""
    layer.sums()
    for factor in layer.factors:
        torch.mm(factor, factor)


def ekfac(layer: Layer) -> None:
    """As `eigen`, and square the rows in the bases."""
    eigen(layer)
    A, G = (torch.mm(X, factor).square_() for X, factor in zip(layer.rows, layer.factors, strict=True))
    torch.mm(G.mT, A)


def sngd(layer: Layer) -> None:
    """Make the kernel and invert it."""
    layer.gram(len(layer.rows[0]))
    _invert(layer.kernel)


def kid(layer: Layer) -> None:
    """Make the kernel, decompose it, and make and invert that of the chosen rows."""
    layer.gram(len(layer.rows[0]))
    torch.linalg.cholesky_ex(layer.kernel)
    kis(layer)


def kis(layer: Layer) -> None:
    """Take the norms of the rows, and make and invert the kernel of the chosen ones."""
    for X in layer.rows:
        torch.linalg.vector_norm(X, dim=1)
    layer.gram(layer.chosen)
    _invert(layer.kernel[: layer.chosen, : layer.chosen])


def rank_one(layer: Layer) -> None:
    """Take the means of the rows."""
    for X in layer.rows:
        X.mean(0)


def _invert(matrix: Tensor) -> None:
    torch.cholesky_inverse(torch.linalg.cholesky_ex(matrix).L)


LIMITS: dict[str, Callable[[Layer], None]] = {
    "KFAC eigen": eigen,
    "KFAC inverse": inverse,
    "KFAC iterative": iterative,
    "KFAC, A alone": inputs,
    "EKFAC": ekfac,
    "SNGD": sngd,
    "HyLo, KID": kid,
    "HyLo, KIS": kis,
    "RankOne": rank_one,
}


def layers(network: str, samples: int, chosen: int, device: torch.device) -> list[Layer]:
    """Return the layers of a network, with their factors and kernels ready."""
    made = [Layer(rows, chosen) for rows in Layers(NETWORKS[network](), samples, device=device).rows]
    for layer in made:
        assert layer.factors
        assert layer.kernel is not None
    return made
