"""Who does what: a pure function of sizes and costs, testable without processes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from natgrad.errors import require
from natgrad.placement.options import Placement

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a layer asks for.

    Attributes:
        parts: The work of each part of a renewal, any unit.
        sums: Elements of its statistics as they travel (triangles).
        results: Elements of what each part makes, as they travel.
        gradients: Elements of its gradient.
        itemsize: Bytes of each.
        alone: Whether the samples of one rank alone make up statistics; those of tables do not, most of whose rows a
            rank does not look up.
    """

    parts: Mapping[str, float]
    sums: int = 0
    results: Mapping[str, int] = field(default_factory=dict)
    gradients: int = 0
    itemsize: int = 4
    alone: bool = True

    @property
    def cost(self) -> float:
        """The work of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Seat:
    """The ranks of one layer.

    Attributes:
        workers: Those that hold what its renewals make, in rising order.
        owners: For each part the worker that does it; None: every worker does it for itself.
        sums: Who receives the sums: "all" ranks, or the only "worker"; or it sums "alone", of its own samples.
    """

    workers: tuple[int, ...]
    owners: Mapping[str, int | None]
    sums: Literal["all", "worker", "alone"] = "all"


@dataclass(frozen=True)
class Plan(Generic[Key]):
    """The seats of all layers on a grid of ranks (KAISA): rank = row q + column.

    The workers of a layer are a column; each of them sends the preconditioned gradients to the others of its row.

    Attributes:
        placement: What was asked for; never "auto".
        ranks: P.
        columns: q.
        seats: For each layer.
    """

    placement: Placement
    ranks: int
    columns: int
    seats: Mapping[Key, Seat]

    def row(self, rank: int) -> range:
        """Return the ranks of the row of `rank`."""
        start = rank - rank % self.columns
        return range(start, start + self.columns)

    def column(self, rank: int) -> range:
        """Return the ranks that are workers of the same layers as `rank`."""
        return range(rank % self.columns, self.ranks, self.columns)

    def server(self, key: Key, rank: int) -> int:
        """Return the worker of a layer that gives `rank` the preconditioned gradients: itself, if it is one."""
        return rank - rank % self.columns + self.seats[key].workers[0] % self.columns

    def works(self, key: Key, rank: int) -> bool:
        """Tell whether `rank` is a worker of a layer."""
        return self.server(key, rank) == rank

    def receives(self, key: Key, rank: int) -> bool:
        """Tell whether `rank` receives the sums of a layer, and keeps their running averages."""
        return self.seats[key].sums == "all" or self.works(key, rank)

    def captures(self, key: Key, rank: int) -> bool:
        """Tell whether the samples of `rank` count in the sums of a layer."""
        return self.seats[key].sums != "alone" or self.works(key, rank)


def make_plan(
    placement: Placement, works: Mapping[Key, Work], ranks: int, seated: Mapping[Key, Seat] | None = None
) -> Plan[Key]:
    """Place layers on ranks.

    Layers go to the columns, and the parts of a layer to the workers of its column, by descending cost, each to the
    least-loaded so far (longest processing time, within 4/3 of the best makespan); with owners="round-robin" in turn.
    Where all ranks are workers, A and G of a layer may be apart (Pauloski 2022, section 4.1).

    Args:
        placement: The options.
        works: What each layer asks for, in the order of the model; the same on every rank.
        ranks: P >= 1.
        seated: The seats of layers that are to keep their workers.

    Returns:
        The plan; the same on every rank, since ties go to the lower rank and equal costs keep their order.

    Raises:
        ValueError: if an option does not fit the number of ranks.
    """
    require(ranks >= 1, "ranks", ranks, "a whole number >= 1")
    speeds = placement.speeds if placement.speeds is not None else (1.0,) * ranks
    require(len(speeds) == ranks, "speeds", placement.speeds, f"a number for each of the {ranks} ranks")
    if placement.name == "auto":
        placement = Placement(name="comm-opt", owners=placement.owners, speeds=placement.speeds, costs=placement.costs)
    size = placement.workers(ranks)
    columns = ranks // size
    members = [tuple(range(column, ranks, columns)) for column in range(columns)]
    homes = _columns(placement, works, members, speeds, seated or {})
    owners = _owners(placement, works, homes, members, speeds)
    seats = {key: Seat(members[home], owners[key], _sums(placement, works[key])) for key, home in homes.items()}
    return Plan(placement, ranks, columns, seats)


def _sums(placement: Placement, work: Work) -> Literal["all", "worker", "alone"]:
    if placement.name == "dp":
        return "alone" if work.alone else "worker"
    return "worker" if placement.name == "reduce-scatter" else "all"


def _columns(
    placement: Placement,
    works: Mapping[Key, Work],
    members: Sequence[Sequence[int]],
    speeds: Sequence[float],
    seated: Mapping[Key, Seat],
) -> dict[Key, int]:
    """Return the column of each layer, in the order of the model."""
    kept = {seat.workers: column for column, seat in enumerate(Seat(tuple(own), {}) for own in members)}
    homes = {key: kept[seat.workers] for key, seat in seated.items() if key in works and seat.workers in kept}
    if placement.owners == "round-robin":
        homes = {key: index % len(members) for index, key in enumerate(works)} | homes
    else:
        load = _Load([sum(speeds[rank] for rank in own) for own in members])
        for key, home in homes.items():
            load.add(home, _cost(placement, key, works[key]))
        for key in _descending({key: _cost(placement, key, work) for key, work in works.items() if key not in homes}):
            homes[key] = load.give(range(len(members)), _cost(placement, key, works[key]))
    return {key: homes[key] for key in works}


def _owners(
    placement: Placement,
    works: Mapping[Key, Work],
    homes: Mapping[Key, int],
    members: Sequence[Sequence[int]],
    speeds: Sequence[float],
) -> dict[Key, dict[str, int | None]]:
    """Return the owner of each part."""
    costs = {
        (key, part): _cost(placement, key, work) * cost / (work.cost or 1.0)
        for key, work in works.items()
        for part, cost in work.parts.items()
    }
    owners: dict[Key, dict[str, int | None]] = {key: {} for key in works}
    load = _Load(speeds)
    turns = [0] * len(members)
    for key, part in costs if placement.owners == "round-robin" else _descending(costs):
        home, work = homes[key], works[key]
        own = members[home]
        if placement.name == "pipelined" and _is_cheaper_everywhere(placement, costs[key, part], work, part):
            owners[key][part] = None
            for rank in own:
                load.add(rank, costs[key, part])
        elif placement.owners == "round-robin":
            owners[key][part] = own[turns[home] % len(own)]
            turns[home] += 1
        else:
            owners[key][part] = load.give(own, costs[key, part])
    return owners


def _is_cheaper_everywhere(placement: Placement, cost: float, work: Work, part: str) -> bool:
    """Tell whether every rank decomposes a part sooner than it would receive the result (SPD-KFAC, section IV-B)."""
    return placement.link.work(cost) < placement.link.message(work.results.get(part, 0) * work.itemsize)


def _cost(placement: Placement, key: Key, work: Work) -> float:
    measured = (placement.costs or {}).get(str(key))
    return work.cost if measured is None else measured


def _descending(costs: Mapping[Key, float]) -> Iterable[Key]:
    return sorted(costs, key=lambda key: -costs[key])


class _Load:
    """What each of some workers has to do so far, in its own time."""

    def __init__(self, speeds: Sequence[float]) -> None:
        self._speeds = speeds
        self._load = [0.0] * len(speeds)

    def add(self, worker: int, cost: float) -> None:
        self._load[worker] += cost / self._speeds[worker]

    def give(self, workers: Iterable[int], cost: float) -> int:
        """Give work to the one that will be done with it first, and return that one."""
        best = min(workers, key=lambda worker: (self._load[worker] + cost / self._speeds[worker], worker))
        self.add(best, cost)
        return best
