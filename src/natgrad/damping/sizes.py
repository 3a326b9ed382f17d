"""Measure the sizes of Fisher, gradients and parameters for adaptive damping."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite, nan
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from natgrad.damping.adaptive import Extent
from natgrad.damping.quadratic import accountants
from natgrad.distributed import Communicator
from natgrad.distributed.fsdp import copies, held_rows, local
from natgrad.linalg import tensor_on
from natgrad.state.block_group import BlockGroup
from natgrad.state.measures import measured
from natgrad.state.sharded import Rows

if TYPE_CHECKING:
    from natgrad.preconditioner.gradients.clip import Clip


def extent(
    groups: Sequence[BlockGroup], runtime: Communicator, device: torch.device, clip: Clip, scale: float | Tensor
) -> Extent:
    """Return the argument of `Adaptation.measure`.

    Sizes are those of the present running averages, 0 without any. One worker contributes each layer and its gradient
    (for shards, all ranks of its copy), each rank its part of the parameters, and the first rank the learning rate.
    Collective, in one message on `device`.

    Args:
        groups: All layers with curvature.
        runtime: The ranks.
        device: The device of the message.
        clip: The KL clip of the step.
        scale: The factor that makes raw gradients those of the mean loss.
    """
    counts = [group.parameters(member) for group in groups for member in group.members]
    layers, start, rows = len(counts), 0, Rows(runtime)
    message = torch.zeros(2 * layers + 2, dtype=torch.float64, device=device)
    for group, accountant in zip(groups, accountants(groups), strict=True):
        stop = start + len(group.members)
        if accountant == runtime.rank and group.weight is not None:
            own = measured(group, "trace")[0].double() / tensor_on(group.device, counts[start:stop])
            message[start:stop] = own.nan_to_num(0.0, 0.0, 0.0).to(device)
        for index, member in enumerate(group.members, layers + start):
            held = [held_rows(slot, rows.held(slot)) for slot in member.layer.slots if rows.counts(slot, accountant)]
            for gradient in held:
                if gradient is not None:
                    message[index] += (_square(gradient) * scale**2).to(device)
        start = stop
    slots = {id(slot.parameter): slot for group in groups for one in group.members for slot in one.layer.slots}
    for slot in slots.values():
        parameter = slot.parameter.detach()
        square = local(parameter).double().square().sum().to(device)
        message[-2] += square / copies(slot.name, parameter, runtime.ranks)
    message[-1] = float(runtime.rank == 0) * _rate(groups, clip) / scale
    if runtime.ranks > 1 and layers:
        runtime.sum_(message, {"counters": len(message)})
    *told, length, rate = message.tolist()
    sizes, squares = told[:layers], told[layers:]
    counted = [index for index in range(layers) if sizes[index] > 0 and isfinite(squares[index])]
    trace = sum(sizes[index] * counts[index] for index in counted)
    bound = clip.bound if isinstance(clip.bound, (int, float)) else None
    return Extent(
        sizes=sizes,
        coherence=sum(squares[index] for index in counted) / trace if trace else nan,
        room=inf if bound is None or not isfinite(length) or length <= 0 else bound / length,
        pace=None if bound is None or not isfinite(rate) or rate <= 0 else rate**2 / bound,
    )


def _square(part: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(part, dtype=torch.float64)
    return norm.square()


def _rate(groups: Sequence[BlockGroup], clip: Clip) -> float:
    """Return the largest learning rate of layers with curvature, including those of schedulers; 0 if not needed."""
    if clip.optimizer is None or not isinstance(clip.bound, (int, float)):
        return 0.0
    covered = {id(slot.parameter) for group in groups for member in group.members for slot in member.layer.slots}
    used = [
        options
        for options in clip.optimizer.param_groups
        if any(id(parameter) in covered for parameter in options["params"])
    ]
    rates = (options.get(name) for options in used for name in ("lr", "initial_lr", "max_lr"))
    return max((float(rate) for rate in rates if rate is not None), default=0.0)
