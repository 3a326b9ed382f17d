"""The norms of a rank's gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from natgrad.distributed.fsdp import local
from natgrad.linalg import tensor_on


def gradient_norms(parameters: Sequence[Tensor]) -> Tensor:
    """Return the norms of this rank's gradients ``[n]``, which are finite only if the gradients are; 0 for none."""
    places, gradients = [], []
    for place, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is None:
            continue
        gradient = local(gradient)
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        places.append(place)
        gradients.append(gradient)
    wide = torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32
    device = parameters[0].device
    norms = [norm.to(device) for norm in torch._foreach_norm(gradients, dtype=wide)] if gradients else []
    if len(norms) == len(parameters):
        return torch.stack(norms)
    every = torch.zeros(len(parameters), dtype=wide, device=device)
    if norms:
        every[tensor_on(device, places, torch.int64)] = torch.stack(norms)
    return every
