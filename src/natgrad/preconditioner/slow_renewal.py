"""Warn before training that renewals will be slow."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from natgrad.curvature import KFAC, Curvature
from natgrad.distributed import Link, Plan
from natgrad.errors import NatgradWarning
from natgrad.layers import Layer
from natgrad.linalg.device import on_host

_SLOW = 10.0
"""Seconds of one renewal from which on there is a warning."""

_SHOWN = 3
"""How many layers it names at most."""

_SMALLER = 1024
"""The size of blocks that it suggests."""


def renewal_seconds(plan: Plan[str]) -> float:
    """Return the estimated seconds of one renewal's decompositions on the busiest rank.

    The estimate is for one processor core with ``plan.placement.link.speed`` multiply-adds per second. It ignores
    threads, because eigendecompositions are largely bound by memory.

    Args:
        plan: The plan.
    """
    speeds = plan.placement.speeds or (1.0,) * plan.ranks
    # The plan's weights are multiply-adds, or measurements of the user in any unit.
    unit = sum(work.cost for work in plan.layers.values()) / (sum(plan.weights.values()) or 1.0)
    return plan.placement.link.work(max(plan.renewal(rank) / speeds[rank] for rank in range(plan.ranks)) * unit)


def warn_of_slow_renewal(plan: Plan[str], layers: Sequence[tuple[Layer, Curvature]]) -> None:
    """Warn, on all ranks alike, where one renewal takes longer than 10 seconds by the plan's own estimate.

    On an accelerator there is no warning unless the user has given a `Link`: the usual one is a processor core's.

    Args:
        plan: The plan.
        layers: The layers that it places, with their curvatures.
    """
    accelerated = any(not on_host(slot.parameter) for layer, _ in layers for slot in layer.slots)
    if accelerated and plan.placement.link == Link():
        return
    seconds = renewal_seconds(plan)
    if seconds <= _SLOW:
        return
    costs = {layer.key: plan.placement.link.work(plan.layers[layer.key].cost) for layer, _ in layers}
    slowest = sorted(layers, key=lambda own: -costs[own[0].key])[:_SHOWN]
    named = "; ".join(
        f"{layer.name}, factors of {layer.inputs} and {layer.outputs} columns: {costs[layer.key]:.1f} s"
        for layer, _ in slowest
    )
    message = (
        f"natgrad: one renewal takes about {seconds:.0f} s by the plan's estimate for a processor core, the first in "
        f"the first step. Most of it: {named}. {_remedies(*slowest[0])}"
    )
    warnings.warn(message, NatgradWarning, stacklevel=3)


def _remedies(layer: Layer, curvature: Curvature) -> str:
    """Return what to choose instead, for the layer that costs most."""
    found = []
    if isinstance(curvature, KFAC):
        if curvature.form == "eigen":
            found.append('KFAC(form="inverse"), about a fifth of it')
        found.append(f'{type(curvature).__name__}(max_factor_size={_SMALLER}, wide="blocks")')
    found.append(f"{{{layer.name!r}: None, ...}} as the curvature, which leaves that layer to the optimizer")
    found.append("refresh=Refresh(inverses=100) or more, for fewer renewals")
    return f"Choose instead {', or '.join(found)}."
