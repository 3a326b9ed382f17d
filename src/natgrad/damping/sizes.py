"""How large the Fisher of each layer is, and how long the parameters are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, isfinite

import torch
from torch import Tensor

from natgrad.damping.quadratic import accounted
from natgrad.damping.trust_region import TrustRegion
from natgrad.linalg import tensor_on
from natgrad.placement import Runtime
from natgrad.renewal.measure import measured
from natgrad.stacks.blocks import Stack
from natgrad.stacks.shards import Spread, is_sharded


def sizes(
    stacks: Sequence[Stack], runtime: Runtime, device: torch.device, bound: float | TrustRegion | None
) -> tuple[list[float], float]:
    """Return what `Adaptation.measure` takes: the layers' mean eigenvalues, and κ over the parameters' squared length.

    The former are ``tr F / d`` of the running averages as they are now, 0 where there are none. Each layer's is told by
    one of its workers; of the parameters each rank tells its part. Collective, in one message on `device`.

    Args:
        stacks: All layers with curvature.
        runtime: The ranks.
        device: Where the message is made.
        bound: The KL clip; the second is infinite unless it is a number, and where the length is 0 or no number.
    """
    layers = sum(len(stack.members) for stack in stacks)
    message, start = torch.zeros(layers + 1, dtype=torch.float64, device=device), 0
    mine = {id(stack) for stack in accounted(stacks, runtime.rank)}
    for stack in stacks:
        stop = start + len(stack.members)
        if id(stack) in mine and stack.weight is not None:
            numbers = [stack.parameters(member) for member in stack.members]
            own = measured(stack, "trace")[0].double() / tensor_on(stack.device, numbers)
            message[start:stop] = own.nan_to_num(0.0, 0.0, 0.0).to(device)
        start = stop
    for part, copies in _parts(stacks, runtime.ranks):
        message[layers] += part.double().square().sum().to(device) / copies
    if runtime.ranks > 1 and layers:
        runtime.sum_(message, {"counters": layers + 1})
    *found, square = message.tolist()
    known = isinstance(bound, (int, float)) and isfinite(square) and square > 0
    return found, bound / square if known else inf


def _parts(stacks: Sequence[Stack], ranks: int) -> Iterator[tuple[Tensor, float]]:
    """Yield what this rank has of each parameter with curvature, and how many ranks have the same part."""
    slots = {id(slot.parameter): slot for stack in stacks for one in stack.members for slot in one.layer.slots}
    for slot in slots.values():
        parameter = slot.parameter.detach()
        if is_sharded(parameter):
            yield parameter.to_local(), ranks / Spread.of(slot.name, parameter).ranks
        else:
            yield parameter, float(ranks)
