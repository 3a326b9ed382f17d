"""What has to be the same on all ranks, compared before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from natgrad.errors import AveragingError

Told = tuple[int, Mapping[str, Any]]
"""A rank, by its number in the world, and what it was given: plain values by their names."""


def check_alike(everyone: Sequence[Told]) -> None:
    """Check that all ranks were given the same values under the same names.

    Args:
        everyone: What each rank was given; the same sequence on every rank, which so raises on all of them or on none.

    Raises:
        AveragingError: naming what differs, with the values and the ranks that have them.
    """
    names = dict.fromkeys(name for _, given in everyone for name in given)
    found = {name: _holders(everyone, name) for name in names}
    told = [
        f"{name}: " + ", ".join(f"{value!r} on ranks {ranks}" for value, ranks in holders)
        for name, holders in found.items()
        if len(holders) > 1
    ]
    if told:
        raise AveragingError(f"the ranks differ in {'; '.join(told)}")


def _holders(everyone: Sequence[Told], name: str) -> list[tuple[Any, list[int]]]:
    """Return the values of a name, each with the ranks that have it."""
    holders: list[tuple[Any, list[int]]] = []
    for rank, given in everyone:
        value = given.get(name, "not given")
        known = next((ranks for other, ranks in holders if other == value), None)
        if known is None:
            holders.append((value, [rank]))
        else:
            known.append(rank)
    return holders
