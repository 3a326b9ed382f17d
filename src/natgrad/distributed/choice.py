"""Make the plan of a placement; for "auto", of the one that KAISA's rule chooses."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from natgrad.distributed.assign import assign
from natgrad.distributed.options import Placement
from natgrad.distributed.plan import Assignment, LayerDemand, Plan
from natgrad.distributed.table import mebibytes
from natgrad.errors import require
from natgrad.schedule import check_whole

Key = TypeVar("Key", bound=Hashable)


def make_plan(
    placement: Placement,
    works: Mapping[Key, LayerDemand],
    ranks: int,
    previous: Mapping[Key, Assignment] | None = None,
    *,
    factor_refreshes: float = 10.0,
    share: int | None = None,
) -> Plan[Key]:
    """Assign the layers to ranks.

    Layers are assigned to columns of the grid of ranks, and the tasks of a layer to the workers of its column. Both are
    assigned in order of descending cost to the column or worker that would finish first (longest processing time:
    within 4/3 of the best makespan for equally fast ranks, Graham 1969, otherwise within twice the best, Gonzalez et
    al. 1977). With owners="round-robin" they are assigned in turn. If a layer has several workers, different ones may
    decompose A and G (Pauloski 2022, sections 4.2 and 4.3).

    Args:
        placement: The options.
        works: The demand of each layer, in the order of the model; equal on all ranks.
        ranks: The number of ranks, P >= 1.
        previous: The assignments of layers that keep their workers.
        factor_refreshes: The number of factor refreshes for each inverse refresh, for the balance of "dp".
        share: The bytes that the curvature of a rank may take under "auto" without `Placement.memory`. None: no limit.

    Returns:
        The plan, equal on all ranks: ties go to the lower rank, and equal costs keep their order. If all costs differ,
        the order of `works` matters only for owners="round-robin".

    Raises:
        ValueError: if an option does not fit the number of ranks, or a rank would hold more than `Placement.memory`.
    """
    check_whole("ranks", ranks, 1)
    speeds = placement.speeds
    require(speeds is None or len(speeds) == ranks, "speeds", speeds, f"a number for each of the {ranks} ranks")
    for name in ("costs", "positions"):
        unknown = set(getattr(placement, name) or ()) - set(map(str, works))
        require(bool(previous) or not unknown, name, sorted(unknown)[:5], "numbers by the keys of the model's layers")
    limit = share if placement.memory is None else placement.memory
    first, *others = _candidates(placement, ranks)
    plan = comm_opt = assign(first, works, ranks, previous or {}, factor_refreshes)
    for candidate in others:
        if limit is None or plan.most_held <= limit:
            break
        plan = assign(candidate, works, ranks, previous or {}, factor_refreshes)
        reason = f"because 'comm-opt' would hold {mebibytes(comm_opt.most_held)} of at most {mebibytes(limit)}"
        plan = replace(plan, note=f"{plan.note}, {reason}")
    if not previous:  # a layer added during training raises no error
        plan.check_memory()
    return plan


def _candidates(placement: Placement, ranks: int) -> Iterator[Placement]:
    """Yield the placement, for "auto" those that it chooses from, the largest number of workers first."""
    if placement.name != "auto":
        yield placement
        return
    yield replace(placement, name="comm-opt")
    for workers in range(ranks // 2, 1, -1):
        if ranks % workers == 0:
            yield replace(placement, name="hybrid", fraction=workers / ranks)
    if ranks > 1:
        yield replace(placement, name="mem-opt")
