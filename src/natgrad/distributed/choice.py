"""Which placement: the one asked for, or the cheapest by the model of what messages and work cost."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from natgrad.distributed.assign import assign
from natgrad.distributed.cost import Cycle, Link
from natgrad.distributed.options import Placement
from natgrad.distributed.plan import Assignment, Exchange, LayerDemand, Plan
from natgrad.distributed.table import mebibytes
from natgrad.errors import require

Key = TypeVar("Key", bound=Hashable)

# So many of the placements that cost the least a note names.
_NAMED = 3
# "comm-opt" is left only where that saves a tenth, which the model may err by: it alone has every rank hold all state.
_WORTH = 0.9


def make_plan(
    placement: Placement,
    works: Mapping[Key, LayerDemand],
    ranks: int,
    seated: Mapping[Key, Assignment] | None = None,
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
        cycle: How often factors and inverses are renewed, which "auto" and the balance of "dp" depend on.

    Returns:
        The plan; the same on every rank, since ties go to the lower rank and equal costs keep their order. Where no two
        costs are equal, the order of `is_gradient_worker` matters to owners="round-robin" only.

    Raises:
        ValueError: if an option does not fit the number of ranks, or a rank would hold more than the memory allows.
    """
    whole = isinstance(ranks, int) and not isinstance(ranks, bool)
    require(whole and ranks >= 1, "ranks", ranks, "a whole number >= 1")
    speeds = placement.speeds
    require(speeds is None or len(speeds) == ranks, "speeds", speeds, f"a number for each of the {ranks} ranks")
    nodes = placement.nodes
    require(ranks % nodes == 0, "nodes", nodes, f"a number that divides the {ranks} ranks")
    for name in ("costs", "positions"):
        unknown = set(getattr(placement, name) or ()) - set(map(str, works))
        require(bool(seated) or not unknown, name, sorted(unknown)[:5], "numbers by the keys of the model's layers")
    cycle = cycle or Cycle()
    if placement.name == "auto":
        return _cheapest(placement, works, ranks, seated or {}, cycle)
    plan = assign(placement, works, ranks, seated or {}, cycle)
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
    exchanges, link = plan.exchanges(in_bytes=True), plan.placement.link
    factors = _message(exchanges["factors"], "factors", link)
    inverses = _message(exchanges["inverses"], "inverses", link) + link.work(_decompositions(plan))
    row = plan.placement.link_of(plan.ranks, plan.columns)
    step = _products(plan) + _message(exchanges["step"], "gradients", row) + _collection(plan) + _shards(plan, row)
    return factors / cycle.factors + inverses / cycle.inverses + step + _reduction(plan, cycle)


def _message(exchanges: Iterable[Exchange], kind: str, link: Link) -> float:
    """Return the seconds of messages of some kind that are under way at once, by the busiest rank."""
    sent: dict[int, float] = {}
    received: dict[int, float] = {}
    for exchange in exchanges:
        for rank in exchange.ranks if exchange.kind == kind and exchange.elements else ():
            sent[rank] = sent.get(rank, 0.0) + exchange.sent(rank)
            received[rank] = received.get(rank, 0.0) + exchange.received(rank)
    busiest = max([*sent.values(), *received.values()], default=0.0)
    return link.message(busiest) if busiest else 0.0


def _decompositions(plan: Plan[Key]) -> float:
    """Return the multiply-adds of a renewal on the rank that is done last, as if it were of speed 1."""
    speeds = plan.placement.speeds or (1.0,) * plan.ranks
    unit = sum(work.cost for work in plan.layers.values()) / (sum(plan.weights.values()) or 1.0)
    return max(plan.renewal(rank) / speeds[rank] for rank in range(plan.ranks)) * unit


def _products(plan: Plan[Key]) -> float:
    """Return the seconds of preconditioning."""
    speeds = plan.placement.speeds or (1.0,) * plan.ranks
    work = [0.0] * plan.columns
    for key in plan.seats:
        work[plan.home(key)] += plan.layers[key].solve
    return max(work[rank % plan.columns] / speeds[rank] for rank in range(plan.ranks)) / plan.placement.link.products


def _shards(plan: Plan[Key], row: Link) -> float:
    """Return the seconds of giving preconditioned rows to the others of a row, where any layer is sharded."""
    if plan.columns == 1 or not any(layer.shards for layer in plan.layers.values()):
        return 0.0
    sizes = [0.0] * plan.columns
    for key, layer in plan.layers.items():
        sizes[plan.home(key)] += layer.gradients * layer.itemsize / (len(layer.shards) or 1)
    total, others = sum(sizes), plan.columns - 1
    return row.message(max(max(others * own, total - own) for own in sizes))


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
    sizes = [0] * plan.columns
    for key, layer in plan.layers.items():
        sizes[plan.home(key)] += layer.gradients * layer.itemsize
    every = range(plan.ranks)
    owned = Exchange("reduced", every, tuple(sizes), True)
    return _message(
        [owned if plan.columns == plan.ranks else Exchange("reduced", every, sum(sizes))],
        "reduced",
        plan.placement.link,
    )


def _cheapest(
    placement: Placement, works: Mapping[Key, LayerDemand], ranks: int, seated: Mapping[Key, Assignment], cycle: Cycle
) -> Plan[Key]:
    """Return the plan of the placement that costs the least, of those that fit and train the same."""
    plans = [assign(candidate, works, ranks, seated, cycle) for candidate in _candidates(placement, ranks)]
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
