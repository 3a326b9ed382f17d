"""Loaders of different lengths, made to end together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from natgrad.averaging.nodes import Grid
from natgrad.errors import AveragingError


def even(grid: Grid, loader: Any, *, repeat: bool) -> Iterator[Any]:
    """Yield the batches of `loader`, and more until every rank has had as many as the one with most; collective.

    One message an epoch, where a message a step (as torch's ``Join`` needs) would make all nodes wait for each other.

    Args:
        grid: The ranks.
        loader: This rank's: something with a length.
        repeat: Whether to go on with its first batches again; else with None.

    Raises:
        AveragingError: on all ranks, if one has no batch to repeat.
    """
    lengths = grid.everywhere(len(loader))
    if repeat and not all(lengths) and any(lengths):
        raise AveragingError(f"ranks without a single batch to repeat: {[r for r, n in enumerate(lengths) if not n]}")
    yield from loader
    missing = max(lengths) - len(loader)
    if not repeat:
        yield from [None] * missing
        return
    while missing:
        for batch, _ in zip(loader, range(missing), strict=False):
            missing -= 1
            yield batch
