"""Make the plan of a placement; for "auto", of the cheapest one by a model of communication and computation."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from natgrad.distributed.assign import assign
from natgrad.distributed.options import Link, Placement, RefreshIntervals
from natgrad.distributed.plan import Assignment, Collective, LayerDemand, Plan
from natgrad.distributed.table import mebibytes
from natgrad.errors import require
from natgrad.schedule import check_whole

Key = TypeVar("Key", bound=Hashable)

# The number of cheapest placements in a plan's note.
_NAMED = 3
# "auto" leaves "comm-opt" only for a placement that costs less than this fraction, because of the model's error.
_WORTH = 0.9


def make_plan(
    placement: Placement,
    works: Mapping[Key, LayerDemand],
    ranks: int,
    previous: Mapping[Key, Assignment] | None = None,
    intervals: RefreshIntervals | None = None,
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
        intervals: The intervals of factors and inverses, for "auto" and the balance of "dp".

    Returns:
        The plan, equal on all ranks: ties go to the lower rank, and equal costs keep their order. If all costs differ,
        the order of `works` matters only for owners="round-robin".

    Raises:
        ValueError: if an option does not fit the number of ranks, or a rank would hold more than `Placement.memory`.
    """
    check_whole("ranks", ranks, 1)
    speeds = placement.speeds
    require(speeds is None or len(speeds) == ranks, "speeds", speeds, f"a number for each of the {ranks} ranks")
    nodes = placement.nodes
    require(ranks % nodes == 0, "nodes", nodes, f"a number that divides the {ranks} ranks")
    for name in ("costs", "positions"):
        unknown = set(getattr(placement, name) or ()) - set(map(str, works))
        require(bool(previous) or not unknown, name, sorted(unknown)[:5], "numbers by the keys of the model's layers")
    intervals = intervals or RefreshIntervals()
    if placement.name == "auto":
        return _cheapest(placement, works, ranks, previous or {}, intervals)
    plan = assign(placement, works, ranks, previous or {}, intervals)
    _check_memory(placement, [] if previous else [plan])  # a layer added during training raises no error
    return plan


def step_seconds(plan: Plan[Key], intervals: RefreshIntervals) -> float:
    """Return the mean seconds of a step that depend on the placement, by the model of its `Link`.

    They are those of the busiest rank for messages, decompositions and products with the gradients. Messages sent at
    the same time cost one latency together, and the larger of the bytes sent and received. Costs that do not depend on
    the placement (the model's passes, local statistics, the wrapper's messages) are not included. Nothing overlaps.
    """
    exchanges, link = plan.exchanges(in_bytes=True), plan.placement.link
    factors = _message(exchanges["factors"], "factors", link)
    inverses = _message(exchanges["inverses"], "inverses", link) + link.work(_decompositions(plan))
    row = plan.placement.link_of(plan.ranks, plan.columns)
    step = _products(plan) + _message(exchanges["step"], "gradients", row) + _collection(plan) + _shards(plan, row)
    return factors / intervals.factors + inverses / intervals.inverses + step + _reduction(plan, intervals)


def _message(exchanges: Iterable[Collective], kind: str, link: Link) -> float:
    """Return the seconds of all messages of one kind, sent at the same time, on the busiest rank."""
    sent: dict[int, float] = {}
    received: dict[int, float] = {}
    for exchange in exchanges:
        for rank in exchange.ranks if exchange.kind == kind and exchange.elements else ():
            sent[rank] = sent.get(rank, 0.0) + exchange.sent(rank)
            received[rank] = received.get(rank, 0.0) + exchange.received(rank)
    busiest = max([*sent.values(), *received.values()], default=0.0)
    return link.message(busiest) if busiest else 0.0


def _decompositions(plan: Plan[Key]) -> float:
    """Return the multiply-adds of an inverse refresh on the rank that finishes last, divided by its speed."""
    speeds = plan.placement.speed_of(plan.ranks)
    unit = sum(work.cost for work in plan.layers.values()) / (sum(plan.weights.values()) or 1.0)
    return max(plan.refresh_work(rank) / speeds[rank] for rank in range(plan.ranks)) * unit


def _products(plan: Plan[Key]) -> float:
    """Return the seconds of preconditioning on the rank that finishes last."""
    speeds = plan.placement.speed_of(plan.ranks)
    work = [0.0] * plan.columns
    for key in plan.assignments:
        work[plan.column_of(key)] += plan.layers[key].solve
    return max(work[rank % plan.columns] / speeds[rank] for rank in range(plan.ranks)) / plan.placement.link.products


def _shards(plan: Plan[Key], row: Link) -> float:
    """Return the seconds of sending preconditioned rows within a row of the grid; 0 unless FSDP2 shards a layer."""
    if plan.columns == 1 or not any(layer.shards for layer in plan.layers.values()):
        return 0.0
    sizes = [0.0] * plan.columns
    for key, layer in plan.layers.items():
        sizes[plan.column_of(key)] += layer.gradients * layer.itemsize / (len(layer.shards) or 1)
    total, others = sum(sizes), plan.columns - 1
    return row.message(max(max(others * size, total - size) for size in sizes))


def _collection(plan: Plan[Key]) -> float:
    """Return the seconds of gathering sharded gradients on the workers, for shards of equal size."""
    sizes = [0.0] * plan.columns
    S = 1
    for key, layer in plan.layers.items():
        if layer.shards:
            S = len(layer.shards)
            sizes[plan.column_of(key)] += sum(layer.shards) * layer.itemsize
    if not any(sizes):
        return 0.0
    # A rank sends its share of each layer to the layer's workers among the S ranks of its replica, and receives the
    # shares of the other ranks for the layers that it works for.
    workers = max(1, S // plan.columns)
    sent = sum(sorted(sizes, reverse=True)[:S]) * workers / S - min(sizes) / S
    copy = plan.placement.link_of(plan.ranks, S)
    return copy.message(max(sent, max(sizes) * (S - 1) / S))


def _reduction(plan: Plan[Key], intervals: RefreshIntervals) -> float:
    """Return the seconds of summing gradients: on each layer's worker if it has one, otherwise on all ranks."""
    if not intervals.reduces or plan.ranks == 1:
        return 0.0
    sizes = [0] * plan.columns
    for key, layer in plan.layers.items():
        sizes[plan.column_of(key)] += layer.gradients * layer.itemsize
    ranks = range(plan.ranks)
    to_owners = Collective("reduced", ranks, tuple(sizes), True)
    exchange = to_owners if plan.columns == plan.ranks else Collective("reduced", ranks, sum(sizes))
    return _message([exchange], "reduced", plan.placement.link)


def _cheapest(
    placement: Placement,
    works: Mapping[Key, LayerDemand],
    ranks: int,
    previous: Mapping[Key, Assignment],
    intervals: RefreshIntervals,
) -> Plan[Key]:
    """Return the plan of the cheapest placement that fits the memory and leaves the results unchanged."""
    plans = [assign(candidate, works, ranks, previous, intervals) for candidate in _candidates(placement, ranks)]
    if len(plans) == 1:
        _check_memory(placement, [] if previous else plans)
        return plans[0]
    fitting = [plan for plan in plans if placement.memory is None or _most_held(plan) <= placement.memory]
    _check_memory(placement, [] if fitting else plans)
    seconds = [step_seconds(plan, intervals) for plan in fitting]
    priced = sorted((cost, index) for index, cost in enumerate(seconds))
    if fitting[0].columns == 1 and priced[0][0] > _WORTH * seconds[0]:
        priced.sort(key=lambda price: price[1] > 0)
    best = fitting[priced[0][1]]
    prices = [f"{fitting[index].placement} {_in_words(cost)}" for cost, index in priced]
    # "comm-opt" is always included.
    rest = prices[1:_NAMED] + [price for price in prices[_NAMED:] if price.startswith("comm-opt")]
    note = f"placement {prices[0]} a step by the model" + (f" ({', '.join(rest)})" if rest else "")
    if len(fitting) < len(plans):
        others = len(plans) - len(fitting)
        note += f"; {others} other{' holds' if others == 1 else 's hold'} more than {mebibytes(placement.memory or 0)}"
    return replace(best, note=note)


def _candidates(placement: Placement, ranks: int) -> Iterator[Placement]:
    """Yield the placements whose results are those of one process at every step."""
    yield replace(placement, name="comm-opt")
    if ranks == 1:
        return
    for size in range(ranks // 2, 1, -1):
        if ranks % size == 0:
            yield replace(placement, name="hybrid", fraction=size / ranks)
    yield replace(placement, name="mem-opt")
    yield replace(placement, name="reduce-scatter")


def _check_memory(placement: Placement, plans: list[Plan[Key]]) -> None:
    """Check that the plan with the smallest demand fits `placement.memory`; without plans, check nothing."""
    if placement.memory is None or not plans:
        return
    least = min(plans, key=_most_held)
    fits = _most_held(least) <= placement.memory
    require(fits, "memory", placement.memory, f"at least {_most_held(least)} bytes, which '{least.placement}' holds")


def _most_held(plan: Plan[Key]) -> int:
    return max(plan.held(rank) for rank in range(plan.columns))


def _in_words(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
