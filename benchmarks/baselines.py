"""Optimizers that are compared with natgrad's and that no package has in this form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(X: Tensor, steps: int = 5) -> Tensor:
    """Return the polar factor of a matrix to within a third of each singular value, as Muon does."""
    a, b, c = _COEFFICIENTS
    wide = X.shape[0] <= X.shape[1]
    X = X if wide else X.mT
    X = X / X.norm().clamp(min=1e-20)
    for _ in range(steps):
        S = X @ X.mT
        X = torch.addmm(X, torch.addmm(S, S, S, beta=b, alpha=c), X, beta=a)
    return X if wide else X.mT


class LeanMuon(Optimizer):
    """Muon (Jordan 2024) in the dtype of its parameters, with Nesterov momentum and updates of the size of AdamW's."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.9) -> None:
        """Optimize matrices, and the kernels of convolutions as matrices."""
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad.flatten(1)
                if not state:
                    state["momentum"] = torch.zeros_like(gradient)
                state["momentum"].lerp_(gradient, 1 - group["momentum"])
                update = newton_schulz(gradient.lerp(state["momentum"], group["momentum"]))
                size = 0.2 * max(update.shape) ** 0.5
                parameter.sub_(update.view_as(parameter), alpha=size * group["lr"])
