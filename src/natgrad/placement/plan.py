"""Who does which part: a pure function of costs, testable without processes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from natgrad.errors import require

Key = TypeVar("Key", bound=Hashable)

PLACEMENTS = ("auto", "comm-opt")


@dataclass(frozen=True)
class Plan(Generic[Key]):
    """Owners of the parts of a renewal.

    Attributes:
        owners: For each part the rank that does it.
        ranks: P.
    """

    owners: Mapping[Key, int]
    ranks: int


def make_plan(placement: str, costs: Mapping[Key, float], ranks: int) -> Plan[Key]:
    """Place parts on ranks.

    COMM-OPT (Pauloski 2022, section 4.1): every rank holds everything; parts go to ranks by descending cost, each to
    the least-loaded so far (longest processing time, within 4/3 of the best makespan), factor by factor.

    Args:
        placement: One of `PLACEMENTS`; "auto" is "comm-opt".
        costs: The work of each part, any unit.
        ranks: P >= 1.

    Returns:
        The plan; the same on every rank, since ties go to the lower rank and equal costs keep their order.

    Raises:
        ValueError: if `placement` or `ranks` is not allowed.
    """
    require(placement in PLACEMENTS, "placement", placement, " or ".join(map(repr, PLACEMENTS)))
    require(ranks >= 1, "ranks", ranks, "a whole number >= 1")
    load = [0.0] * ranks
    owners: dict[Key, int] = {}
    for key, cost in sorted(costs.items(), key=lambda item: -item[1]):
        owner = load.index(min(load))
        owners[key] = owner
        load[owner] += cost
    return Plan(owners, ranks)
