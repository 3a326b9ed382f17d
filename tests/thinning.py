"""Some of the cells of a product of parameters: the others are slow tests."""

from collections.abc import Sequence
from itertools import combinations
from zlib import crc32

import pytest


def covering(cells: Sequence[dict[str, str]], together: int) -> list[int]:
    """Return the places of some cells in which every value occurs (1 together), or every pair that occurs in any (2).

    Args:
        cells: The values of the parameters, by name.
        together: How many parameters are looked at together.
    """
    wanted = [set(combinations(sorted(cell.items()), min(together, len(cell)))) for cell in cells]
    missing, chosen = set().union(*wanted), []
    while missing:
        best = max(range(len(cells)), key=lambda place: len(wanted[place] & missing))
        missing -= wanted[best]
        chosen.append(best)
    return chosen


def some(name: str, places: Sequence[int], count: int) -> list[int]:
    """Return `count` of the places, evenly spaced; where they begin depends on the name of the test."""
    first = crc32(name.encode()) % len(places)
    return [places[(first + round(step * len(places) / count)) % len(places)] for step in range(count)]


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Mark as slow what `pytest.mark.values`, `pairs` and `some` leave out of the products that tests are."""
    products: dict[str, list[pytest.Item]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cells in products.items():
        chosen = [place for place, cell in enumerate(cells) if not cell.get_closest_marker("slow")]
        for marker, together in (("values", 1), ("pairs", 2)):
            if cells[0].get_closest_marker(marker):
                params = [{key: repr(value) for key, value in cell.callspec.params.items()} for cell in cells]
                chosen = covering(params, together)
        if number := cells[0].get_closest_marker("some"):
            chosen = some(name, chosen, min(number.args[0], len(chosen)))
        for place in set(range(len(cells))) - set(chosen):
            cells[place].add_marker(pytest.mark.slow)
