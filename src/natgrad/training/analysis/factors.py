"""The Kronecker factors: their change from step to step (Osawa 2019, eq. 21, figure 5), and their eigenvalues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The change of one factor.

    Attributes:
        step: t, the optimizer steps before the batch of X_t.
        layer: The layer's name.
        factor: "A" or "G".
        drift: ``‖X_t - X_{t-1}‖_F / ‖X_{t-1}‖_F``, over all blocks of the layer.
    """

    step: int
    layer: str
    factor: str
    drift: float


def drift(before: Tensor, now: Tensor) -> float:
    """Return ``‖X_t - X_{t-1}‖_F / ‖X_{t-1}‖_F``; infinite if only X_{t-1} is zero."""
    before, now = before.double(), now.double()
    moved, size = float((now - before).norm()), float(before.norm())
    if size == 0:
        return 0.0 if moved == 0 else float("inf")
    return moved / size


def drifts(
    step: int, before: Mapping[str, Mapping[str, Tensor]], now: Mapping[str, Mapping[str, Tensor]]
) -> list[Drift]:
    """Return the drift of each factor of the layers in both mappings.

    Args:
        step: t.
        before: X_{t-1} ``[n, d, d]`` by layer and factor.
        now: X_t likewise.
    """
    return [
        Drift(step=step, layer=layer, factor=name, drift=drift(before[layer][name], factor))
        for layer, factors in now.items()
        if layer in before
        for name, factor in factors.items()
    ]


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
