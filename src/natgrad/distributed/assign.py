"""Assign layers to ranks, in order of descending cost."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar, get_args

import numpy as np

from natgrad.distributed.options import Placement
from natgrad.distributed.plan import Assignment, LayerDemand, Plan
from natgrad.distributed.rules import Destination
from natgrad.errors import require, require_one_of

Key = TypeVar("Key", bound=Hashable)

Owners: TypeAlias = dict[Key, dict[str, "int | None"]]

CORE_SPEED = 5e10
"""Multiply-adds of decompositions per second on one processor core (d³ for an inverse, 5 d³ for eigenvectors)."""
# A message of n bytes takes latency + n / bandwidth seconds: gloo on a 10 Gbit/s network.
_LATENCY, _BANDWIDTH = 2e-4, 1.25e9


def assign(
    placement: Placement,
    works: Mapping[Key, LayerDemand],
    ranks: int,
    previous: Mapping[Key, Assignment],
    factor_refreshes: float,
) -> Plan[Key]:
    """Return the plan of one placement other than "auto", as `natgrad.distributed.make_plan` describes."""
    speeds = placement.speed_of(ranks)
    columns = ranks // placement.workers(ranks)
    workers = [tuple(range(column, ranks, columns)) for column in range(columns)]
    assignments = {key: Assignment((), {}, _sums(placement, work, ranks // columns)) for key, work in works.items()}
    note = f"placement {placement}"
    plan: Plan[Key] = Plan(
        placement, ranks, columns, assignments, works, weigh(placement, works, assignments, factor_refreshes), note
    )
    column_of = _columns(plan, workers, speeds, previous)
    owners = _owners(plan, column_of, workers, speeds)
    return replace(
        plan,
        seats={
            key: replace(assignment, workers=workers[column_of[key]], owners=owners[key])
            for key, assignment in assignments.items()
        },
    )


def weigh(
    placement: Placement,
    works: Mapping[Key, LayerDemand],
    assignments: Mapping[Key, Assignment],
    factor_refreshes: float,
) -> dict[Key, float]:
    """Return the work of each layer between two inverse refreshes: the measured cost, otherwise the modelled one.

    Modelled costs are scaled to the unit of the measured ones.
    """
    modelled = {
        key: work.cost + factor_refreshes * _construction(placement, key, work, assignments[key])
        for key, work in works.items()
    }
    costs = placement.costs or {}
    measured = {key: costs[str(key)] for key in works if str(key) in costs}
    total = sum(modelled[key] for key in measured)
    unit = sum(measured.values()) / total if total else 1.0
    return {key: measured.get(key, work * unit) for key, work in modelled.items()}


def _construction(placement: Placement, key: Key, work: LayerDemand, assignment: Assignment) -> float:
    """Return the multiply-adds of building a layer's factors once.

    They are 0 if all ranks build them, because each then has the same share, or if positions are unknown.
    """
    if placement.positions is None or assignment.sums != "alone":
        return 0.0
    return work.sums * placement.positions.get(str(key), 0.0)


def _sums(placement: Placement, work: LayerDemand, workers: int) -> Destination:
    rule = placement.rule
    sums = rule.sums(work)
    require_one_of(f"{rule.name}.sums", sums, *get_args(Destination))
    fits = sums == "all" or (workers == 1 and not rule.all_ranks_work)
    require(fits, f"{rule.name}.sums", sums, "'all', unless each layer has one worker")
    return "worker" if sums == "all" and work.rows is not None else sums


def _columns(
    plan: Plan[Key], workers: Sequence[Sequence[int]], speeds: Sequence[float], previous: Mapping[Key, Assignment]
) -> dict[Key, int]:
    """Return the column of each layer: the previous one, that of the rule, the next in turn, or the least loaded."""
    known = {tuple(ranks): column for column, ranks in enumerate(workers)}
    kept = {
        key: known[previous[key].workers]
        for key in plan.assignments
        if key in previous and previous[key].workers in known
    }
    rule = plan.placement.rule
    chosen = rule.columns({str(key): work for key, work in plan.layers.items()}, len(workers))
    for key in plan.assignments:
        if key not in kept and str(key) in chosen:
            column = chosen[str(key)]
            fits = isinstance(column, int) and 0 <= column < len(workers)
            require(fits, f"{rule.name}.columns()[{key!r}]", column, f"a whole number below {len(workers)}")
            kept[key] = column
    if plan.placement.owners == "round-robin":
        return {key: kept.get(key, index % len(workers)) for index, key in enumerate(plan.assignments)}
    column_of, weights = dict(kept), plan.weights
    load = _Load(range(len(workers)), [sum(speeds[rank] for rank in ranks) for ranks in workers])
    # Sorted, because floating-point sums depend on the order, and the order of layers may differ.
    for key in _descending({key: weights[key] for key in kept}):
        load.add(kept[key], weights[key])
    for key in _descending({key: weight for key, weight in weights.items() if key not in kept}):
        column_of[key] = load.add_to_least(weights[key])
    return column_of


def _owners(
    plan: Plan[Key], column_of: Mapping[Key, int], workers: Sequence[Sequence[int]], speeds: Sequence[float]
) -> Owners[Key]:
    """Return the owner of each task: the least loaded worker, the largest tasks first; or workers in turn."""
    placement = plan.placement
    weights = {(key, part): plan.weight(key, part) for key, work in plan.layers.items() for part in work.parts}
    owners: Owners[Key] = {key: {} for key in plan.layers}
    loads = [_Load(ranks, [speeds[rank] for rank in ranks]) for ranks in workers]
    assigned = [0] * len(workers)
    for key, part in weights if placement.owners == "round-robin" else _descending(weights):
        column, work, weight = column_of[key], plan.layers[key], weights[key, part]
        load = loads[column]
        if placement.rule.decomposes_everywhere and _is_cheaper_everywhere(work, part):
            owners[key][part] = None
            load.add(slice(None), weight)
        elif placement.owners == "round-robin":
            owners[key][part] = workers[column][assigned[column] % len(workers[column])]
            assigned[column] += 1
        else:
            owners[key][part] = load.add_to_least(weight)
    return owners


def _is_cheaper_everywhere(work: LayerDemand, part: str) -> bool:
    """Return whether every rank decomposes a part sooner than it would receive the result (SPD-KFAC, section IV-B)."""
    if work.rows is not None:
        return False  # the size of the result depends on the batch
    size = work.results.get(part, 0) * work.wire
    return work.parts[part] / CORE_SPEED < _LATENCY + size / _BANDWIDTH


def _descending(costs: Mapping[Key, float]) -> Iterable[Key]:
    return sorted(costs, key=lambda key: -costs[key])


class _Load:
    """The work assigned to each worker so far."""

    def __init__(self, workers: Sequence[int], speeds: Sequence[float]) -> None:
        self._workers, self._speeds = workers, np.array(speeds)
        self._work = np.zeros(len(workers))

    def add(self, index: int | slice, cost: float) -> None:
        """Add work to one worker or several."""
        self._work[index] += cost

    def add_to_least(self, cost: float) -> int:
        """Add work to the worker that would finish it first, and return this worker. Ties go to the first."""
        best = int(((self._work + cost) / self._speeds).argmin())
        self.add(best, cost)
        return self._workers[best]
