"""How large the Fisher of each layer is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from natgrad.damping.quadratic import accounted
from natgrad.linalg import tensor_on
from natgrad.placement import Runtime
from natgrad.renewal.measure import measured
from natgrad.stacks.blocks import Stack


def mean_eigenvalues(stacks: Sequence[Stack], runtime: Runtime, device: torch.device) -> list[float]:
    """Return ``tr F / d`` of each layer of the running averages as they are now, 0 where there are none; collective.

    Each layer's is told by one of its workers, in one message on `device`.
    """
    layers = sum(len(stack.members) for stack in stacks)
    sizes, start = torch.zeros(layers, dtype=torch.float64, device=device), 0
    mine = {id(stack) for stack in accounted(stacks, runtime.rank)}
    for stack in stacks:
        stop = start + len(stack.members)
        if id(stack) in mine and stack.weight is not None:
            numbers = [stack.parameters(member) for member in stack.members]
            own = measured(stack, "trace")[0].double() / tensor_on(stack.device, numbers)
            sizes[start:stop] = own.nan_to_num(0.0, 0.0, 0.0).to(device)
        start = stop
    if runtime.ranks > 1 and layers:
        runtime.sum_(sizes, {"counters": layers})
    return [float(size) for size in sizes.tolist()]
