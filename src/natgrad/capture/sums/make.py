"""Which messages the sums of a placement travel in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from natgrad.capture.sums.bucketed import BucketedStatistics
from natgrad.capture.sums.sums import Gain, StatisticsBuffer
from natgrad.distributed import Communicator, Placement
from natgrad.state.block_group import BlockGroup


def make_sums(
    stacks: Sequence[BlockGroup],
    placement: Placement,
    runtime: Communicator,
    wire: torch.dtype | None,
    gain: Gain,
    riders: int,
    names: Sequence[str],
) -> StatisticsBuffer:
    """Return the sums of some stacks as a placement sends them.

    Args:
        stacks: The blocks.
        placement: The options.
        runtime: The ranks.
        wire: The dtype in which sums travel, if narrower than their own.
        gain: What `StatisticsBuffer.close` is given, by the number of backward passes.
        riders: Those of `StatisticsBuffer`.
        names: The names of the layers, in the order of the model.
    """
    riders = riders if runtime.ranks > 1 else 0
    if placement.rule.sends_during_backward and runtime.ranks > 1:
        return BucketedStatistics(
            stacks, names=names, bucket=placement.bucket, runtime=runtime, wire=wire, gain=gain, riders=riders
        )
    return StatisticsBuffer(stacks, fused=runtime.ranks > 1, riders=riders)
