"""The relative change of the Kronecker factors from one step to the next (Osawa 2019, eq. 21 and figure 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
