"""The seats of all layers, by longest processing time."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar, get_args

import numpy as np

from natgrad.distributed.cost import Cycle
from natgrad.distributed.options import Placement
from natgrad.distributed.plan import Assignment, LayerDemand, Plan
from natgrad.distributed.rules import Destination
from natgrad.errors import require, require_one_of

Key = TypeVar("Key", bound=Hashable)

Owners: TypeAlias = dict[Key, dict[str, "int | None"]]


def assign(
    placement: Placement,
    works: Mapping[Key, LayerDemand],
    ranks: int,
    seated: Mapping[Key, Assignment],
    cycle: Cycle,
) -> Plan[Key]:
    """Place layers on ranks as `natgrad.distributed.make_plan` says; `placement` fits and is not "auto"."""
    speeds = placement.speeds if placement.speeds is not None else (1.0,) * ranks
    columns = ranks // placement.workers(ranks)
    members = [tuple(range(column, ranks, columns)) for column in range(columns)]
    seats = {key: Assignment((), {}, _sums(placement, work, ranks // columns)) for key, work in works.items()}
    note = f"placement {placement}"
    bare: Plan[Key] = Plan(placement, ranks, columns, seats, works, weigh(placement, works, seats, cycle), note)
    homes = _columns(bare, members, speeds, seated)
    owners = _owners(bare, homes, members, speeds)
    return replace(
        bare, seats={key: replace(seat, workers=members[homes[key]], owners=owners[key]) for key, seat in seats.items()}
    )


def weigh(
    placement: Placement, works: Mapping[Key, LayerDemand], seats: Mapping[Key, Assignment], cycle: Cycle
) -> dict[Key, float]:
    """Return the work of each layer between two renewals: as measured, or as modelled, in the unit of the measured."""
    modelled = {key: work.cost + _construction(placement, key, work, seats[key], cycle) for key, work in works.items()}
    measured = {key: placement.costs[str(key)] for key in works if str(key) in (placement.costs or {})}  # type: ignore[index]
    total = sum(modelled[key] for key in measured)
    unit = sum(measured.values()) / total if total else 1.0
    return {key: measured.get(key, work * unit) for key, work in modelled.items()}


def _construction(placement: Placement, key: Key, work: LayerDemand, seat: Assignment, cycle: Cycle) -> float:
    """Return the products that build a layer's factors, where only its worker does, as work of a decomposition."""
    if placement.positions is None or seat.sums != "alone":
        return 0.0
    products = work.sums * placement.positions.get(str(key), 0.0) * cycle.inverses / cycle.factors
    return products * placement.link.speed / placement.link.products


def _sums(placement: Placement, work: LayerDemand, workers: int) -> Destination:
    rule = placement.rule
    sums = rule.sums(work)
    require_one_of(f"{rule.name}.sums", sums, *get_args(Destination))
    fits = sums == "all" or (workers == 1 and not rule.all_ranks_work)
    require(fits, f"{rule.name}.sums", sums, "'all', unless each layer has one worker")
    return "worker" if sums == "all" and work.rows is not None else sums


def _columns(
    plan: Plan[Key], members: Sequence[Sequence[int]], speeds: Sequence[float], seated: Mapping[Key, Assignment]
) -> dict[Key, int]:
    """Return the column of each layer."""
    known = {tuple(own): column for column, own in enumerate(members)}
    kept = {key: known[seated[key].workers] for key in plan.seats if key in seated and seated[key].workers in known}
    rule = plan.placement.rule
    chosen = rule.columns({str(key): work for key, work in plan.layers.items()}, len(members))
    for key in plan.seats:
        if key not in kept and str(key) in chosen:
            column = chosen[str(key)]
            fits = isinstance(column, int) and 0 <= column < len(members)
            require(fits, f"{rule.name}.columns()[{key!r}]", column, f"a whole number below {len(members)}")
            kept[key] = column
    if plan.placement.owners == "round-robin":
        return {key: kept.get(key, index % len(members)) for index, key in enumerate(plan.seats)}
    homes, weights = dict(kept), plan.weights
    load = _Load(range(len(members)), [sum(speeds[rank] for rank in own) for own in members])
    # In this order whatever the order of the layers, for sums of rounded numbers depend on theirs.
    for key in _descending({key: weights[key] for key in kept}):
        load.add(kept[key], weights[key])
    for key in _descending({key: weight for key, weight in weights.items() if key not in kept}):
        homes[key] = load.give(weights[key])
    return homes


def _owners(
    plan: Plan[Key], homes: Mapping[Key, int], members: Sequence[Sequence[int]], speeds: Sequence[float]
) -> Owners[Key]:
    """Return the owner of each part: the worker that will be done with it first, the largest parts first."""
    placement = plan.placement
    weights = {(key, part): plan.weight(key, part) for key, work in plan.layers.items() for part in work.parts}
    owners: Owners[Key] = {key: {} for key in plan.layers}
    loads = [_Load(own, [speeds[rank] for rank in own]) for own in members]
    turns = [0] * len(members)
    for key, part in weights if placement.owners == "round-robin" else _descending(weights):
        load, work, weight = loads[homes[key]], plan.layers[key], weights[key, part]
        cheaper = placement.rule.decomposes_everywhere and _is_cheaper_everywhere(placement, work, part)
        if cheaper or part in work.everywhere:
            owners[key][part] = None
            load.add(slice(None), weight)
        elif placement.owners == "round-robin":
            own = members[homes[key]]
            owners[key][part] = own[turns[homes[key]] % len(own)]
            turns[homes[key]] += 1
        else:
            owners[key][part] = load.give(weight)
    return owners


def _is_cheaper_everywhere(placement: Placement, work: LayerDemand, part: str) -> bool:
    """Return whether every rank decomposes a part sooner than it would receive the result (SPD-KFAC, section IV-B)."""
    if work.rows is not None:
        return False  # whose number, and with it the size, nobody knows before the batch
    size = work.results.get(part, 0) * work.travels
    return placement.link.work(work.parts[part]) < placement.link.message(size)


def _descending(costs: Mapping[Key, float]) -> Iterable[Key]:
    return sorted(costs, key=lambda key: -costs[key])


class _Load:
    """What each of some workers has to do so far."""

    def __init__(self, workers: Sequence[int], speeds: Sequence[float]) -> None:
        self._workers, self._speeds = workers, np.array(speeds)
        self._work = np.zeros(len(workers))

    def add(self, index: int | slice, cost: float) -> None:
        """Add to the work of one of them, or of some."""
        self._work[index] += cost

    def give(self, cost: float) -> int:
        """Give work to the one that will be done with it first, the first of equals, and return that one."""
        best = int(((self._work + cost) / self._speeds).argmin())
        self.add(best, cost)
        return self._workers[best]
