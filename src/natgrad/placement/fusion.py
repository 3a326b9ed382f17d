"""Which sums leave together while the backward pass goes on: a pure function of when and how many."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from natgrad.placement.cost import Link


def fuse(
    ready: Sequence[float],
    sizes: Sequence[float],
    kinds: Sequence[Hashable],
    *,
    link: Link,
    bucket: float,
    ranks: int,
) -> list[range]:
    """Cut the layers of a backward pass into messages such that the last one arrives as early as it can.

    Messages leave one after the other, each no sooner than its last layer is ready. That layer l + 1 joins the message
    of l iff it is ready before that would start plus the latency (SPD-KFAC, Shi 2021, section IV-A; MG-WFBP, Shi 2019)
    is what is best for two layers. Here it is done for all of them: the first j layers arrive at the earliest at
    ``E_j = min_i max(ready_j, E_i) + α + β size(i..j)``, which takes L times the layers of a message to compute.

    Args:
        ready: When each of L layers is ready, in seconds, rising: the order in which they leave.
        sizes: Bytes of each.
        kinds: What must be equal for layers to leave together, as their dtype.
        link: What messages cost.
        bucket: The most bytes of a message; a layer of more leaves alone.
        ranks: P: a byte that is summed over the ranks is sent 2 (P - 1) / P times.

    Returns:
        The layers of each message, in the order in which they leave; of equally early ones, of the fewest messages.
    """
    share = 2 * (ranks - 1) / ranks
    ends: list[tuple[float, int]] = [(0.0, 0)]  # of the first j layers: when they arrive, and in how many messages
    starts: list[int] = []
    for last in range(len(ready)):
        best, start, size = (float("inf"), 0), last, 0.0
        for first in range(last, -1, -1):
            size += sizes[first]
            if first < last and (size > bucket or kinds[first] != kinds[last]):
                break
            before, count = ends[first]
            end = (max(ready[last], before) + link.message(share * size), count + 1)
            if end < best:
                best, start = end, first
        ends.append(best)
        starts.append(start)
    messages: list[range] = []
    stop = len(ready)
    while stop:
        messages.append(range(starts[stop - 1], stop))
        stop = starts[stop - 1]
    return messages[::-1]
