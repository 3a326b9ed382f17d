"""The messages in which the sums of a step leave, by when they are ready."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import torch

from natgrad.placement import Placement, arrival, fuse, narrower
from natgrad.stacks.blocks import Member, Stack
from natgrad.sums.clock import Item
from natgrad.sums.messages import Message, neighbours


def form(
    members: Mapping[str, tuple[Stack, Member]],
    ready: Mapping[Item, float],
    *,
    placement: Placement,
    ranks: int,
    wire: torch.dtype | None,
) -> tuple[list[Message], list[Message]]:
    """Return messages that hold all of their layers, and messages of which some leave in the forward pass.

    The latter are the former where the last message would arrive later by them: where latency is what messages cost.

    Args:
        members: The layers, by their names.
        ready: When the whole sums of each are ready, and the early ones; inf: nobody knows.
        placement: The options.
        ranks: P.
        wire: The dtype in which sums travel, if narrower than their own.
    """
    known = [time for time in ready.values() if time < inf]
    first, last = min(known, default=0.0), max(known, default=0.0)
    whole: dict[Item, float] = {}
    apart: dict[Item, float] = {}
    for name in members:
        time, early = (min(ready.get((name, portion), inf), last) - first for portion in ("whole", "early"))
        whole[name, "whole"] = time
        if ready.get((name, "early"), inf) < inf:
            apart |= {(name, "early"): min(early, time), (name, "rest"): time}
        else:
            apart[name, "whole"] = time

    def cut(times: Mapping[Item, float]) -> tuple[list[Message], float]:
        items = sorted(times, key=lambda item: times[item])
        layers = [(*members[name], portion) for name, portion in items]
        seconds, link = [times[item] for item in items], placement.link
        alone = [Message(neighbours([layer])) for layer in layers]
        sizes = [one.numel * narrower(wire, layer[0].dtype).itemsize for one, layer in zip(alone, layers, strict=True)]
        kinds = [(stack.dtype, stack.device, portion == "early") for stack, _, portion in layers]
        ranges = fuse(seconds, sizes, kinds, link=link, bucket=placement.bucket, ranks=ranks)
        messages = [Message(neighbours(layers[own.start : own.stop])) for own in ranges]
        return messages, arrival(ranges, seconds, sizes, link=link, ranks=ranks)

    (together, latest), (split, later) = cut(whole), cut(apart)
    return together, split if later <= latest else together
