"""In how many messages results leave while the next are made: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from natgrad.placement.cost import Link


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
