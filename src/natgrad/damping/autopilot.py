"""Autopilot: damping chosen from measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite, log, nan
from statistics import quantiles
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from natgrad.damping.adaptive import Adaptation, AdaptiveDamping
from natgrad.damping.quadratic import accountants
from natgrad.distributed import Communicator
from natgrad.distributed.fsdp import copies, held_rows, local
from natgrad.linalg import tensor_on
from natgrad.schedule import check_number
from natgrad.state.block_group import BlockGroup
from natgrad.state.measures import measured
from natgrad.state.parameters import ParameterRows, slots_of

if TYPE_CHECKING:
    from natgrad.preconditioner.gradients.clip import Clip

# The lr² / κ that `share` refers to (a learning rate of 1 and a KL clip of 1e-3), and its smallest value in this unit,
# the smallest that was measured.
_REFERENCE_RATE, _SMALLEST_RATE = 1e3, 1e-4
# γ is proportional to this power of lr² / κ. The power 1/2 would keep lr / γ, the step per gradient in directions
# without curvature, constant.
_POWER = 0.375
# γ before the first statistics; not used.
_UNKNOWN = 1e-3
# Layers whose mean eigenvalue is a smaller fraction of the largest are skipped, such as those behind a layer of zeros.
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Autopilot(AdaptiveDamping):
    """Chooses γ once, from the size of the Fisher and the norm of the parameters.

    γ is computed after the first statistics, before their first use, and then stays constant:

        γ = min(share · (lr² / 1000 κ)^(3/8) · q, κ / (c (stride ‖θ‖)²)),  c = ‖∇‖² / tr F

    q is the lower quartile, on a logarithmic scale, of the layers' mean eigenvalues ``tr F_l / d_l`` with d_l
    parameters each; ‖θ‖ is the norm of all parameters with curvature; ∇ is the gradient of the mean loss; κ is the KL
    clip. lr is the largest learning rate of layers with curvature, either the current one or that from which a
    scheduler starts (``initial_lr``, ``max_lr``). lr² / κ is at least 0.1.

    The second bound: with ``γ ‖V‖² ≤ ⟨V, ∇⟩`` and the clip ``lr² ν² ⟨V, ∇⟩ ≤ κ`` no gradient moves the parameters by
    more than ``sqrt(κ / γ)``, which the bound keeps at least ``stride ‖θ‖ sqrt(c)``. More damping would only slow down
    directions of low curvature. c measures the agreement of the samples' gradients: 1 if they are equal, 1 / m for m
    samples of noise. If the KL clip is not a number, γ is ``share · q``.

    If the loss is multiplied by n, γ is multiplied by n² as the Fisher is, so that natural gradients do not depend on
    the unit of the loss. Measurements: docs/measurements.md.

    Attributes:
        share: The first bound of γ in units of q, at a learning rate of 1 and a KL clip of 1e-3; above 0.
        stride: The largest change of the parameters by one gradient if c is 1, as a fraction of ‖θ‖; above 0.

    Raises:
        ValueError: if `share` or `stride` is not above 0.
    """

    share: float = 150.0
    stride: float = 0.015

    sizes = True

    def __post_init__(self) -> None:
        """Check the options."""
        check_number("share", self.share, "a number > 0", minimum=0, strict=True)
        check_number("stride", self.stride, "a number > 0", minimum=0, strict=True)

    @override
    def begin(self) -> _Sized:
        return _Sized(self)


class _Sized(Adaptation):
    """The state of the rule in one training."""

    def __init__(self, options: Autopilot) -> None:
        self._options = options
        self.gamma, self.awaits_sizes = _UNKNOWN, True

    @override
    def measure(
        self,
        groups: Sequence[BlockGroup],
        runtime: Communicator,
        device: torch.device,
        clip: Clip,
        scale: float | Tensor,
    ) -> None:
        counts = [group.parameters(member) for group in groups for member in group.members]
        sizes, squares, length, rate = _measured(groups, counts, runtime, device, clip, scale)
        usable = [size for size in sizes if isfinite(size) and size > 0]
        counted = [size for size in usable if size > _NEGLIGIBLE * max(usable)]
        known = [index for index, size in enumerate(sizes) if size > 0 and isfinite(squares[index])]
        trace = sum(sizes[index] * counts[index] for index in known)
        coherence = sum(squares[index] for index in known) / trace if trace else nan
        if not counted or not isfinite(coherence):
            return
        logs = [log(size) for size in counted]
        size = exp(quantiles(logs, method="inclusive")[0] if len(logs) > 1 else logs[0])
        longest = inf  # γ that bounds the steps
        if isinstance(clip.bound, (int, float)):
            if isfinite(rate) and rate > 0:
                size *= max(rate**2 / clip.bound / _REFERENCE_RATE, _SMALLEST_RATE) ** _POWER
            if isfinite(length) and length > 0 and coherence > 0:
                longest = clip.bound / length / (coherence * self._options.stride**2)
        self.gamma, self.awaits_sizes = min(self._options.share * size, longest), False

    @override
    def state_dict(self) -> dict[str, float]:
        return {"gamma": self.gamma, "known": int(not self.awaits_sizes)}

    @override
    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.gamma, self.awaits_sizes = float(state["gamma"]), not state["known"]


def _measured(
    groups: Sequence[BlockGroup],
    counts: Sequence[int],
    runtime: Communicator,
    device: torch.device,
    clip: Clip,
    scale: float | Tensor,
) -> tuple[list[float], list[float], float, float]:
    """Return ``tr F / d`` (0 without statistics) and ``‖∇‖²`` of each layer, ``‖θ‖²``, and the learning rate.

    The gradient and the rate are those for the mean loss. One worker adds ``tr F / d`` and ``‖∇‖²`` of a layer (sharded
    gradients: all ranks of its replica), each rank its part of ``‖θ‖²``, and the first rank the learning rate.
    """
    layers, start, rows = len(counts), 0, ParameterRows(runtime)
    message = torch.zeros(2 * layers + 2, dtype=torch.float64, device=device)
    for group, accountant in zip(groups, accountants(groups), strict=True):
        stop = start + len(group.members)
        if accountant == runtime.rank and group.weight is not None:
            sizes = measured(group, "trace")[0].double() / tensor_on(group.device, counts[start:stop])
            message[start:stop] = sizes.nan_to_num(0.0, 0.0, 0.0).to(device)
        for index, member in enumerate(group.members, layers + start):
            held = [held_rows(slot, rows.held(slot)) for slot in member.layer.slots if rows.in_sum(slot, accountant)]
            for gradient in held:
                if gradient is not None:
                    message[index] += (_square(gradient) * scale**2).to(device)
        start = stop
    slots = {id(slot.parameter): slot for group in groups for slot in slots_of(group)}
    for slot in slots.values():
        parameter = slot.parameter.detach()
        square = local(parameter).double().square().sum().to(device)
        message[-2] += square / copies(slot.name, parameter, runtime.ranks)
    message[-1] = float(runtime.rank == 0) * _rate(groups, clip) / scale
    if runtime.ranks > 1 and layers:
        runtime.sum_(message, {"counters": len(message)})
    *totals, length, rate = message.tolist()
    return totals[:layers], totals[layers:], length, rate


def _square(part: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(part, dtype=torch.float64)
    return norm.square()


def _rate(groups: Sequence[BlockGroup], clip: Clip) -> float:
    """Return the largest learning rate of layers with curvature, including those of schedulers; 0 if not needed."""
    if clip.optimizer is None or not isinstance(clip.bound, (int, float)):
        return 0.0
    covered = {id(slot.parameter) for group in groups for slot in slots_of(group)}
    used = [
        options
        for options in clip.optimizer.param_groups
        if any(id(parameter) in covered for parameter in options["params"])
    ]
    rates = (options.get(name) for options in used for name in ("lr", "initial_lr", "max_lr"))
    return max((float(rate) for rate in rates if rate is not None), default=0.0)
