"""Which placement: the one asked for, or the cheapest by the model of what messages and work cost."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from natgrad.errors import require
from natgrad.placement.assign import assign
from natgrad.placement.cost import Cycle
from natgrad.placement.options import Placement
from natgrad.placement.plan import Plan, Seat, Work
from natgrad.placement.table import mebibytes

Key = TypeVar("Key", bound=Hashable)

# So many of the placements that cost the least a note names.
_NAMED = 3
# "comm-opt" is left only where that saves a tenth, which the model may err by: it alone has every rank hold all state.
_WORTH = 0.9


def make_plan(
    placement: Placement,
    works: Mapping[Key, Work],
    ranks: int,
    seated: Mapping[Key, Seat] | None = None,
    cycle: Cycle | None = None,
) -> Plan[Key]:
    """Place layers on ranks.

    Layers go to the columns, and the parts of a layer to the workers of its column, by descending cost, each to the
    one that will be done with it first (longest processing time: within 4/3 of the best makespan among equally fast
    ranks, Graham 1969, and twice the best among others, Gonzalez et al. 1977); with owners="round-robin" in turn.
    Where all ranks are workers, A and G of a layer may be apart (Pauloski 2022, sections 4.2 and 4.3).

    Args:
        placement: The options.
        works: What each layer asks for, in the order of the model; the same on every rank.
        ranks: P >= 1.
        seated: The seats of layers that are to keep their workers.
        cycle: How often factors and inverses are renewed, which "auto" asks.

    Returns:
        The plan; the same on every rank, since ties go to the lower rank and equal costs keep their order. Where no two
        costs are equal, the order of `works` matters to owners="round-robin" only.

    Raises:
        ValueError: if an option does not fit the number of ranks, or a rank would hold more than the memory allows.
    """
    whole = isinstance(ranks, int) and not isinstance(ranks, bool)
    require(whole and ranks >= 1, "ranks", ranks, "a whole number >= 1")
    speeds = placement.speeds
    require(speeds is None or len(speeds) == ranks, "speeds", speeds, f"a number for each of the {ranks} ranks")
    nodes = placement.nodes
    require(ranks % nodes == 0, "nodes", nodes, f"a number that divides the {ranks} ranks")
    unknown = set(placement.costs or ()) - set(map(str, works))
    require(bool(seated) or not unknown, "costs", sorted(unknown)[:5], "work by the keys of the model's layers")
    if placement.name == "auto":
        return _cheapest(placement, works, ranks, seated or {}, cycle or Cycle())
    plan = assign(placement, works, ranks, seated or {})
    # Layers that came later do not end a training.
    _check_memory(placement, [] if seated else [plan])
    return plan


def step_seconds(plan: Plan[Key], cycle: Cycle) -> float:
    """Return the mean seconds of a step that a placement is answerable for, by the model of its `Link`.

    That is, on the rank that has most of it: messages, a latency for those that are under way at once and the bytes
    that the rank sends or receives, whichever are more; decompositions; and products with the gradients. What all
    placements share (the model's own passes, statistics, the wrapper's messages) is left out, and what runs beside it
    is not told apart from what does not.

    Args:
        plan: The plan.
        cycle: How often factors and inverses are renewed.
    """
    return _factors(plan) / cycle.factors + _inverses(plan) / cycle.inverses + _solve(plan) + _reduction(plan, cycle)


def _factors(plan: Plan[Key]) -> float:
    """Return the seconds of the messages of a factor refresh."""
    everywhere, single = 0, [0] * plan.columns
    for key, seat in plan.seats.items():
        size = plan.layers[key].sums * plan.layers[key].travels
        if seat.sums == "all":
            everywhere += size
        elif seat.sums == "worker":
            single[plan.home(key)] += size
    link, others = plan.placement.link, plan.ranks - 1
    seconds = link.message(2 * others * everywhere / plan.ranks) if everywhere and others else 0.0
    if any(single) and others:
        total = sum(single)
        seconds += link.message(max(max(others * own, total - own) for own in single))
    return seconds


def _inverses(plan: Plan[Key]) -> float:
    """Return the seconds of a renewal: its decompositions, and the results sent within columns."""
    link, speeds = plan.placement.link, plan.placement.speeds or (1.0,) * plan.ranks
    unit = sum(work.cost for work in plan.layers.values()) / (sum(plan.weights.values()) or 1.0)
    work = max(plan.renewal(rank) / speeds[rank] for rank in range(plan.ranks)) * unit
    if plan.columns == plan.ranks:
        return link.work(work)
    sent: list[dict[int, int]] = [{} for _ in range(plan.columns)]
    for key, seat in plan.seats.items():
        layer, own = plan.layers[key], sent[plan.home(key)]
        for part, owner in seat.owners.items():
            if owner is not None:
                own[owner] = own.get(owner, 0) + layer.results.get(part, 0) * layer.travels
    # Each owner's results are a message, and all are under way at once; a rank receives those of the others.
    messages = [link.message(_received(own, plan)) for own in sent if own]
    return link.work(work) + max(messages, default=0.0)


def _received(sent: Mapping[int, int], plan: Plan[Key]) -> int:
    """Return the bytes that the worker receives which receives most."""
    least = min(sent.values()) if len(sent) == plan.ranks // plan.columns else 0
    return sum(sent.values()) - least


def _solve(plan: Plan[Key]) -> float:
    """Return the seconds of preconditioning, and of giving its results to the others of a row."""
    link, speeds = plan.placement.link, plan.placement.speeds or (1.0,) * plan.ranks
    work, sizes = [0.0] * plan.columns, [0.0] * plan.columns
    for key in plan.seats:
        layer, home = plan.layers[key], plan.home(key)
        work[home] += layer.solve
        sizes[home] += layer.gradients * layer.itemsize / (len(layer.shards) or 1)
    seconds = max(work[rank % plan.columns] / speeds[rank] for rank in range(plan.ranks)) / link.products
    seconds += _collection(plan)
    if plan.columns == 1 or not any(sizes):
        return seconds
    total, others = sum(sizes), plan.columns - 1
    row = plan.placement.link_of(plan.ranks, plan.columns)
    return seconds + row.message(max(max(others * own, total - own) for own in sizes))


def _collection(plan: Plan[Key]) -> float:
    """Return the seconds of bringing the rows of sharded gradients to the workers, of shards of equal size."""
    sizes = [0.0] * plan.columns
    S = 1
    for key, layer in plan.layers.items():
        if layer.shards:
            S = len(layer.shards)
            sizes[plan.home(key)] += sum(layer.shards) * layer.itemsize
    if not any(sizes):
        return 0.0
    # A rank has a share of each layer, for those of the S ranks of its copy that work for it; and lacks the others'.
    workers = max(1, S // plan.columns)
    sent = sum(sorted(sizes, reverse=True)[:S]) * workers / S - min(sizes) / S
    copy = plan.placement.link_of(plan.ranks, S)
    return copy.message(max(sent, max(sizes) * (S - 1) / S))


def _reduction(plan: Plan[Key], cycle: Cycle) -> float:
    """Return the seconds of summing the gradients: of a layer with one worker on that one only, of others on all."""
    if not cycle.reduces or plan.ranks == 1:
        return 0.0
    link, others = plan.placement.link, plan.ranks - 1
    sizes = [0] * plan.columns
    for key, layer in plan.layers.items():
        sizes[plan.home(key)] += layer.gradients * layer.itemsize
    total = sum(sizes)
    if plan.columns < plan.ranks:
        return link.message(2 * others * total / plan.ranks)
    return link.message(max(max(others * own, total - own) for own in sizes))


def _cheapest(
    placement: Placement, works: Mapping[Key, Work], ranks: int, seated: Mapping[Key, Seat], cycle: Cycle
) -> Plan[Key]:
    """Return the plan of the placement that costs the least, of those that fit and train the same."""
    plans = [assign(candidate, works, ranks, seated) for candidate in _candidates(placement, ranks)]
    if len(plans) == 1:
        _check_memory(placement, [] if seated else plans)
        return plans[0]
    fitting = [plan for plan in plans if placement.memory is None or _most_held(plan) <= placement.memory]
    _check_memory(placement, [] if fitting else plans)
    seconds = [step_seconds(plan, cycle) for plan in fitting]
    priced = sorted((own, index) for index, own in enumerate(seconds))
    if fitting[0].columns == 1 and priced[0][0] > _WORTH * seconds[0]:
        priced.sort(key=lambda price: price[1] > 0)
    best = fitting[priced[0][1]]
    prices = [f"{fitting[index].placement} {_in_words(own)}" for own, index in priced]
    # The user knows comm-opt, whatever its rank among the others.
    rest = prices[1:_NAMED] + [price for price in prices[_NAMED:] if price.startswith("comm-opt")]
    note = f"placement {prices[0]} a step by the model" + (f" ({', '.join(rest)})" if rest else "")
    if len(fitting) < len(plans):
        others = len(plans) - len(fitting)
        note += f"; {others} other{' holds' if others == 1 else 's hold'} more than {mebibytes(placement.memory or 0)}"
    return replace(best, note=note)


def _candidates(placement: Placement, ranks: int) -> Iterator[Placement]:
    """Yield the placements whose results are those of one process at every step, whatever their cost."""
    yield replace(placement, name="comm-opt")
    if ranks == 1:
        return
    for size in range(ranks // 2, 1, -1):
        if ranks % size == 0:
            yield replace(placement, name="hybrid", fraction=size / ranks)
    yield replace(placement, name="mem-opt")
    yield replace(placement, name="reduce-scatter")


def _check_memory(placement: Placement, plans: list[Plan[Key]]) -> None:
    """Check that a rank may hold what one of some plans asks of it; of none nothing is asked."""
    if placement.memory is None or not plans:
        return
    least = min(plans, key=_most_held)
    fits = _most_held(least) <= placement.memory
    require(fits, "memory", placement.memory, f"at least {_most_held(least)} bytes, which '{least.placement}' holds")


def _most_held(plan: Plan[Key]) -> int:
    return max(plan.held(rank) for rank in range(plan.columns))


def _in_words(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
