"""The KL clip: bounds how far a step changes the model's prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from natgrad.layers import Layer
from natgrad.linalg import tensor_on
from natgrad.preconditioner.gradients.stacked import GroupGradients

# Recognised by identity: only a value that the user passes requires an optimizer.
USUAL_BOUND = float("1e-3")


class Clip:
    """ν = min(1, sqrt(κ / (lr² Σ_layers abs⟨V_i, ∇_i⟩)), which bounds lr² ν² VᵀFV by κ (Pauloski 2022, eq. 16).

    Attributes:
        optimizer: Its learning rates are read at each step. A layer's rate is that of its first trained parameter.
        bound: κ. None: off.
        last: ν of the last step, a device tensor; 1.0 while off.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, bound: float | None) -> None:
        """Initialize; without an optimizer the clip is off."""
        self.optimizer = optimizer
        self.bound = None if optimizer is None or bound is None else float(bound)
        self._lacks_optimizer = bound is not None and optimizer is None
        self.last: float | Tensor = 1.0

    def describe(self) -> str:
        """Return a description of the clip."""
        if self.bound is not None:
            return f"KL clip {self.bound:g}"
        return "KL clip off" + (": no optimizer to read the learning rate from" if self._lacks_optimizer else "")

    def apply(
        self,
        entries: Sequence[GroupGradients],
        scale: float | Tensor,
        layer_scale: Callable[[Layer], float | Tensor],
    ) -> None:
        """Scale the preconditioned gradients of all groups by ν.

        `scale`, and for each layer `layer_scale`, make the raw gradients those of the mean loss.
        """
        clipped = [entry for entry in entries if not entry.group.curvature.is_normalized]
        if self.bound is None or not clipped:
            return
        rates, total = self._rates(), torch.zeros_like(clipped[0].inner[0])
        for entry in clipped:
            counts = entry.have_curvature()
            if entry.failed is not None:
                counts &= ~entry.failed
            squares = entry.inner.abs() * _squared_rates(entry, rates, layer_scale)
            total += torch.where(counts, squares, 0).sum().to(total)
        nu = self.last = (self.bound / (total * scale * scale)).sqrt_().clamp_(max=1.0)
        for entry in clipped:
            entry.scale_(nu)

    def _rates(self) -> dict[int, float | Tensor]:
        """Return the learning rates, by the ``id`` of the parameter."""
        assert self.optimizer is not None
        return {id(p): group["lr"] for group in self.optimizer.param_groups for p in group["params"]}


def _squared_rates(
    entry: GroupGradients, rates: Mapping[int, float | Tensor], layer_scale: Callable[[Layer], float | Tensor]
) -> Tensor:
    """Return the squared learning rate of each block ``[n]``."""
    inner, values = entry.inner, []
    for layer in (member.layer for member in entry.members):
        rate = rates.get(id(layer.slots[0].parameter), 0.0) * layer_scale(layer)
        values.append(rate * rate)
    if not any(isinstance(value, Tensor) for value in values) and len(set(values)) == 1:
        return torch.full_like(inner, float(values[0]))
    # Filled on the device, because copying numbers would make the host wait.
    squares = [value.to(inner) if isinstance(value, Tensor) else inner.new_full((), value) for value in values]
    return torch.stack(squares).repeat_interleave(tensor_on(inner.device, entry.counts), output_size=len(inner))
