"""What optimizers remember of each parameter: shaped as it is (momenta, second moments), or a number beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Momentum = Literal["keep", "average", "reset"]


def momenta(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return all tensors that `optimizer` keeps in the shape of a parameter, in the parameters' order."""
    return [
        value
        for parameter in parameters
        for _, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point() and value.ndim
    ]


def reset(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Have `optimizer` begin anew, its counts of steps too: a bias correction goes with what it corrects."""
    for parameter in parameters:
        optimizer.state.pop(parameter, None)
