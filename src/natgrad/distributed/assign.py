"""Make plans: assign layers to ranks, in order of descending cost, and choose the placement for "auto"."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import log
from typing import TypeVar, get_args

import numpy as np

from natgrad.distributed.options import Placement
from natgrad.distributed.plan import Assignment, Plan, mebibytes
from natgrad.distributed.rules import Destination, LayerDemand, Summed
from natgrad.errors import require, require_one_of
from natgrad.schedule import check_whole

Key = TypeVar("Key", bound=Hashable)

# Costs with a smaller ratio are taken for equal.
_ALIKE = 1.05
# The steps between two decompositions, where workers alone precondition: K-FAC's default.
_STEPS = 10.0


def make_plan(
    placement: Placement,
    works: Mapping[Key, LayerDemand],
    ranks: int,
    previous: Mapping[Key, Assignment] | None = None,
    *,
    factor_refreshes: float = 10.0,
    share: int | None = None,
    choices: Sequence[Placement] = (),
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
        choices: What "auto" chooses from: the first that fits in memory, or the last. Empty: KAISA's.

    Returns:
        The plan, equal on all ranks: ties go to the lower rank, and layers of about equal cost are taken by their
        keys, so that the layers of each part of the model go to different workers, which can then send at once. The
        order of `works` matters only for owners="round-robin", and where a layer has several workers and equal tasks.

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
    first, *others = choices or _candidates(placement, ranks)
    plan = preferred = _assign(first, works, ranks, previous or {}, factor_refreshes)
    for candidate in others:
        if limit is None or plan.most_held <= limit:
            break
        plan = _assign(candidate, works, ranks, previous or {}, factor_refreshes)
        reason = f"because '{first}' would hold {mebibytes(preferred.most_held)} of at most {mebibytes(limit)}"
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


def _assign(
    placement: Placement,
    works: Mapping[Key, LayerDemand],
    ranks: int,
    previous: Mapping[Key, Assignment],
    factor_refreshes: float,
) -> Plan[Key]:
    """Return the plan of one placement other than "auto", as `make_plan` describes."""
    speeds = placement.speeds or (1.0,) * ranks
    columns = ranks // placement.workers(ranks)
    workers = [tuple(range(column, ranks, columns)) for column in range(columns)]
    assignments = {key: Assignment((), {}, _sums(placement, work, ranks, columns)) for key, work in works.items()}
    note = f"placement {placement}"
    weights = _weigh(placement, works, assignments, factor_refreshes, steps=_STEPS if columns > 1 else 0)
    plan: Plan[Key] = Plan(placement, ranks, columns, assignments, works, weights, note)
    column_of = _columns(plan, workers, speeds, previous)
    owners = _owners(plan, column_of, workers, speeds)
    return replace(
        plan,
        seats={
            key: replace(assignment, workers=workers[column_of[key]], owners=owners[key])
            for key, assignment in assignments.items()
        },
    )


def _weigh(
    placement: Placement,
    works: Mapping[Key, LayerDemand],
    assignments: Mapping[Key, Assignment],
    factor_refreshes: float,
    *,
    steps: float,
) -> dict[Key, float]:
    """Return the work of each layer between two inverse refreshes: the measured cost, otherwise the modelled one.

    Modelled costs are scaled to the unit of the measured ones.
    """
    modelled = {key: work.cost + steps * work.step_cost for key, work in works.items()}
    positions = placement.positions or {}
    for key, work in works.items():
        if assignments[key].sums == "alone":  # otherwise all ranks build the factors
            modelled[key] += factor_refreshes * work.sums * positions.get(str(key), 0.0)
    costs = placement.costs or {}
    measured = {key: costs[str(key)] for key in works if str(key) in costs}
    total = sum(modelled[key] for key in measured)
    unit = sum(measured.values()) / total if total else 1.0
    return {key: measured.get(key, work * unit) for key, work in modelled.items()}


def _sums(placement: Placement, work: LayerDemand, ranks: int, columns: int) -> Summed:
    rule, workers = placement.rule, ranks // columns
    sums = rule.sums(work)
    require_one_of(f"{rule.name}.sums", sums, *get_args(Destination))
    fits = sums == "all" or (workers == 1 and not rule.all_ranks_work)
    require(fits, f"{rule.name}.sums", sums, "'all', unless each layer has one worker")
    allowed = "'all' or 'worker', as the rule does not set uses_own_samples = True"
    require(sums != "alone" or rule.uses_own_samples, f"{rule.name}.sums", sums, allowed)
    if placement.deferred:
        fits = sums == "all" and not (rule.sends_during_backward or rule.renews_in_background)
        allowed = f"False with '{rule.name}': it is for placements whose factors are summed on all ranks"
        require(fits, "deferred", True, allowed)
    if work.rows:
        return "worker" if sums == "all" else sums
    return "later" if placement.deferred and ranks > 1 and work.can_wait else sums


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
    demands = {str(key): work for key, work in plan.layers.items()}
    chosen = rule.columns(demands, len(workers))
    require(isinstance(chosen, Mapping), f"{rule.name}.columns()", chosen, "a dict of columns by the keys of layers")
    unknown = sorted(map(str, chosen.keys() - demands.keys()))
    require(not unknown, f"keys of {rule.name}.columns()", unknown[:5], f"some of {list(demands)}")
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
    rest = {key: weight for key, weight in weights.items() if key not in kept}
    for key in sorted(rest, key=lambda key: (-_cost_class(rest[key]), str(key))):
        column_of[key] = load.add_to_least(weights[key])
    return column_of


def _owners(
    plan: Plan[Key], column_of: Mapping[Key, int], workers: Sequence[Sequence[int]], speeds: Sequence[float]
) -> dict[Key, dict[str, int]]:
    """Return the owner of each task: the least loaded worker, the largest tasks first; or workers in turn."""
    weights = {(key, part): plan.weight(key, part) for key, work in plan.layers.items() for part in work.parts}
    owners: dict[Key, dict[str, int]] = {key: {} for key in plan.layers}
    if plan.placement.owners == "round-robin":
        assigned = [0] * len(workers)
        for key, part in weights:
            column = column_of[key]
            owners[key][part] = workers[column][assigned[column] % len(workers[column])]
            assigned[column] += 1
        return owners
    loads = [_Load(ranks, [speeds[rank] for rank in ranks]) for ranks in workers]
    for key, part in _descending(weights):
        owners[key][part] = loads[column_of[key]].add_to_least(weights[key, part])
    return owners


def _cost_class(cost: float) -> int:
    """Return a number that is the same for about equal costs, and greater for greater ones."""
    return round(log(cost, _ALIKE)) if cost > 0 else -sys.maxsize


def _descending(costs: Mapping[Key, float]) -> Iterable[Key]:
    return sorted(costs, key=lambda key: -costs[key])


class _Load:
    """The work assigned to each worker so far."""

    def __init__(self, workers: Sequence[int], speeds: Sequence[float]) -> None:
        self._workers, self._speeds = workers, np.array(speeds)
        self._work = np.zeros(len(workers))

    def add(self, index: int, cost: float) -> None:
        """Add work to a worker."""
        self._work[index] += cost

    def add_to_least(self, cost: float) -> int:
        """Add work to the worker that would finish it first, and return this worker. Ties go to the first."""
        best = int(((self._work + cost) / self._speeds).argmin())
        self.add(best, cost)
        return self._workers[best]
