"""The eigenvalues of the Kronecker factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Eigenvalue:
    """One eigenvalue of a factor.

    Attributes:
        step: Optimizer steps before.
        layer: The layer's name.
        factor: "A" or "G".
        index: Its index in descending order, from 0.
        eigenvalue: Its value, at least 0.
    """

    step: int
    layer: str
    factor: str
    index: int
    eigenvalue: float


def spectrum(X: Tensor) -> Tensor:
    """Return the eigenvalues of all blocks ``[n, d, d]`` of a layer in descending order ``[n d]``, in float64.

    Negative ones, from rounding, are set to zero.
    """
    values: Tensor = torch.linalg.eigvalsh(X.double()).flatten().clamp(min=0).sort(descending=True).values
    return values


def spectra(step: int, layer: str, factor: str, X: Tensor) -> list[Eigenvalue]:
    """Return the eigenvalues of a factor ``[n, d, d]``; none if it is not finite."""
    if not bool(X.isfinite().all()):
        return []
    return [
        Eigenvalue(step=step, layer=layer, factor=factor, index=index, eigenvalue=value)
        for index, value in enumerate(spectrum(X).tolist())
    ]
