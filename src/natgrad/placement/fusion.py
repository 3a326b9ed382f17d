"""What leaves together while other work goes on: pure functions of when and how many."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import sqrt

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
    """Cut the sums of the layers of a step into messages such that the last one arrives as early as it can.

    An item is what of a layer leaves together: all of it, or first what needs its inputs alone, A of K-FAC, and then
    the rest. Messages leave one after the other, each no sooner than its last item is ready. That item l + 1 joins the
    message of l iff it is ready before that would start plus the latency (SPD-KFAC, Shi 2021, section IV-A; MG-WFBP,
    Shi 2019) is what is best for two items. Here it is done for all of them: the first j items arrive at the earliest
    at ``E_j = min_i max(ready_j, E_i) + α + β size(i..j)``, which takes L times the items of a message to compute.

    Args:
        ready: When each of L items is ready, in seconds >= 0, rising: the order in which they leave.
        sizes: Bytes of each.
        kinds: What must be equal for items to leave together, as their dtype.
        link: What messages cost.
        bucket: The most bytes of a message; an item of more leaves alone.
        ranks: P: a byte that is summed over the ranks is sent 2 (P - 1) / P times.

    Returns:
        The items of each message, in the order in which they leave; of equally early ones, of the fewest messages.
    """
    share = 2 * (ranks - 1) / ranks
    ends: list[tuple[float, int]] = [(0.0, 0)]  # of the first j items: when they arrive, and in how many messages
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


def groups(seconds: float, size: float, *, link: Link) -> int:
    """Return in how many messages the results of some work should leave, each while the next are made.

    In G of them work and messages take ``G α + max(seconds, β size) + min(seconds, β size) / G``: of what could be done
    at once, one part in G is not. The best G is ``sqrt(min(seconds, β size) / α)``.

    Args:
        seconds: Of the work.
        size: Bytes of its results.
        link: What messages cost.

    Returns:
        G >= 1; without a latency there is no bound, and as many as there are results are the best.
    """
    hidden = min(seconds, size / link.bandwidth)
    return max(1, round(min(sqrt(hidden / link.latency), 2.0**20))) if link.latency else 2**20


def cut(sizes: Sequence[float], count: int) -> list[int]:
    """Cut a sequence into `count` parts of nearly equal size.

    Args:
        sizes: Of each element.
        count: The parts; with fewer elements some have none.

    Returns:
        The part of each element, rising: that in which its middle lies.
    """
    total, before, parts = sum(sizes), 0.0, []
    for size in sizes:
        parts.append(min(count - 1, int(count * (before + size / 2) / total)) if total else 0)
        before += size
    return parts


def arrival(
    messages: Sequence[range], ready: Sequence[float], sizes: Sequence[float], *, link: Link, ranks: int
) -> float:
    """Return when the last of some messages arrives, by the model of `fuse`.

    Args:
        messages: The items of each, in the order in which they leave.
        ready: As in `fuse`.
        sizes: As in `fuse`.
        link: As in `fuse`.
        ranks: As in `fuse`.
    """
    end = 0.0
    for own in messages:
        size = sum(sizes[item] for item in own)
        end = max(end, ready[own[-1]]) + link.message(2 * (ranks - 1) / ranks * size)
    return end
