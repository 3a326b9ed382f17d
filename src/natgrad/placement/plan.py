"""Who does what, and what travels: a pure function of sizes, testable without processes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, Literal, TypeVar

from rich.table import Table
from typing_extensions import override

from natgrad.errors import require
from natgrad.placement.options import Placement
from natgrad.placement.table import render
from natgrad.printed import Printed

Key = TypeVar("Key", bound=Hashable)
Moment = Literal["factors", "inverses", "step"]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a layer asks for of which rows of samples travel, as many as the batch decides.

    Attributes:
        width: Elements of a sample's rows, of inputs and of output gradients, in all blocks.
        share: How many samples each rank selects: a function of those of all ranks, the most of any, and the ranks.
        linked: Whether a selection may bring along what links it to the rows left out (HyLo's Y).
    """

    width: int
    share: Callable[[float, int, int], int]
    linked: bool


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a layer asks for.

    Attributes:
        parts: The work of each part of a renewal, in multiply-adds.
        sums: Elements of its statistics as they travel (triangles).
        replayed: Elements of what a second pass over the batch shows.
        everywhere: Those parts that every worker does for itself.
        results: Elements of what each part makes, as they travel.
        rows: Where rows travel in place of sums.
        gradients: Elements of its gradient.
        shards: Of its sharded parameters, how many elements each of the S shards has; empty: none is sharded.
        replicated: Elements of its other parameters, where some are sharded.
        blocks: How many blocks it has, each of which succeeds or fails by itself.
        solve: The work of preconditioning its gradient, in multiply-adds of matrix products.
        averages: Bytes that those keep who receive its sums.
        held: Bytes that its workers keep of what its renewals make.
        itemsize: Bytes of each element of its gradient as it travels.
        wire: Bytes of each element of its sums and results as they travel; None: the same.
        alone: Whether the samples of one rank alone make up statistics; those of tables do not, most of whose rows a
            rank does not look up.
    """

    parts: Mapping[str, float]
    sums: int = 0
    replayed: int = 0
    everywhere: frozenset[str] = frozenset()
    results: Mapping[str, int] = field(default_factory=dict)
    rows: Rows | None = None
    gradients: int = 0
    shards: tuple[int, ...] = ()
    replicated: int = 0
    blocks: int = 1
    solve: float = 0.0
    averages: int = 0
    held: int = 0
    itemsize: int = 4
    wire: int | None = None
    alone: bool = True

    @property
    def cost(self) -> float:
        """The work of all parts."""
        return sum(self.parts.values())

    @property
    def travels(self) -> int:
        """Bytes of each element of sums and results as they travel."""
        return self.itemsize if self.wire is None else self.wire


@dataclass(frozen=True)
class Seat:
    """The ranks of one layer.

    Attributes:
        workers: Those that hold what its renewals make, in rising order.
        owners: For each part the worker that does it; None: every worker does it for itself.
        sums: Who receives the sums: "all" ranks, or the only "worker"; or it sums "alone", of its own samples. Rows of
            samples go to each "worker", or nowhere.
    """

    workers: tuple[int, ...]
    owners: Mapping[str, int | None]
    sums: Literal["all", "worker", "alone"] = "all"

    def renewers(self, part: str) -> tuple[int, ...]:
        """Return the workers that do a part."""
        owner = self.owners[part]
        return self.workers if owner is None else (owner,)


@dataclass(frozen=True, repr=False)
class Plan(Printed, Generic[Key]):
    """The seats of all layers on a grid of ranks (KAISA): rank = row q + column.

    The workers of a layer are a column; each of them sends the preconditioned gradients to the others of its row.
    ``str()`` prints who does what and what travels, as a table that Rich renders too.

    Attributes:
        placement: What was asked for; never "auto".
        ranks: P.
        columns: q.
        seats: For each layer.
        layers: What each asks for.
        weights: The work by which each was placed: measured, or that of its parts.
        note: Which placement it is and, if "auto" has chosen it, why.
    """

    placement: Placement
    ranks: int
    columns: int
    seats: Mapping[Key, Seat]
    layers: Mapping[Key, Work]
    weights: Mapping[Key, float]
    note: str = ""

    def row(self, rank: int) -> range:
        """Return the ranks of the row of `rank`."""
        start = rank - rank % self.columns
        return range(start, start + self.columns)

    def column(self, rank: int) -> range:
        """Return the ranks that are workers of the same layers as `rank`."""
        return range(rank % self.columns, self.ranks, self.columns)

    def server(self, key: Key, rank: int) -> int:
        """Return the worker of a layer that gives `rank` the preconditioned gradients: itself, if it is one."""
        return rank - rank % self.columns + self.home(key)

    def home(self, key: Key) -> int:
        """Return the column of a layer."""
        return self.seats[key].workers[0] % self.columns

    def works(self, key: Key, rank: int) -> bool:
        """Tell whether `rank` is a worker of a layer."""
        return self.server(key, rank) == rank

    def receives(self, key: Key, rank: int) -> bool:
        """Tell whether `rank` receives the sums of a layer, and keeps their running averages."""
        return self.seats[key].sums == "all" or self.works(key, rank)

    def captures(self, key: Key, rank: int) -> bool:
        """Tell whether the samples of `rank` count in the sums of a layer."""
        return self.seats[key].sums != "alone" or self.works(key, rank)

    def traffic(self, samples: int | Sequence[int] | None = None) -> dict[Moment, dict[str, int]]:
        """Return the elements that all ranks together send, by kind of message.

        Symmetric matrices count as triangles, an all-reduce of n elements as 2 (P - 1) n, one copy of n elements as n.
        "factors" is what one refresh of the factors sends, "inverses" one of the inverses, "step" every step; counters
        ride along, and a refresh of the factors has the "replay" of a second pass follow.
        Beside them, once in a training, a count or two find out whether there is curvature and whether tables serve as
        heads. Gradients that the model's wrapper averages are not counted. Those that it shards (FSDP2) go to the
        workers by rows, and with one column to all ranks, in messages that "padding" makes equally long; rank r has the
        shard r mod S.

        Args:
            samples: Those of a batch, over all ranks and evenly so, or those of each rank. They decide how many "rows"
                are sent, and how large what is made of them; None: these are left out. HyLo that switches counts as in
                a critical epoch, in which it sends more.

        Raises:
            ValueError: if `samples` is none of those.
        """
        local = self._local(samples)
        P, n = self.ranks, self.ranks // self.columns
        copies = {"all": 2 * (P - 1), "worker": P - 1, "alone": 0}
        factors = {"factors": 0, "counters": 0}
        inverses = {"inverses": 0, "counters": 0}
        step = {"gradients": 0, "counters": 0}
        for key, seat in self.seats.items():
            layer, sent = self.layers[key], copies[seat.sums]
            if layer.rows is not None and seat.sums != "alone":
                for kind, elements in self._rows_sent(layer, layer.rows, local).items():
                    inverses[kind] = inverses.get(kind, 0) + elements
                sent = 0
            factors["factors"] += sent * layer.sums
            factors["counters"] += sent * 2  # samples and rows
            if layer.replayed:
                weights = 2 * self._lacked(key) if layer.shards else 0  # before the optimizer's step and after it
                factors["replay"] = factors.get("replay", 0) + sent * layer.replayed + weights
                factors["counters"] += sent * 2
            owned = [part for part, owner in seat.owners.items() if owner is not None]
            inverses["inverses"] += (n - 1) * sum(layer.results.get(part, 0) for part in owned)
            shares = sum(len(seat.renewers(part)) for part in owned)
            inverses["counters"] += (n - 1) * shares * layer.blocks  # whether each has succeeded
            step["gradients"] += self._shards_sent(key) if layer.shards else (P - n) * layer.gradients
            step["counters"] += (P - n) * (layer.blocks + 2)  # ⟨V, W⟩; what has served it, and trouble
        if padding := self._padding():
            step["padding"] = padding
        return {"factors": factors, "inverses": inverses, "step": step}

    def _local(self, samples: int | Sequence[int] | None) -> Sequence[int]:
        """Return how many samples each rank has; nothing where that is not told."""
        if samples is None:
            return ()
        P, own = self.ranks, samples
        if isinstance(own, int) and not isinstance(own, bool):
            own = [own // P + (rank < own % P) for rank in range(P)]
        fits = isinstance(own, Sequence) and len(own) == P and all(isinstance(one, int) and one >= 0 for one in own)
        allowed = f"None, a whole number >= 1, or one of each of the {P} ranks"
        require(fits and sum(own) > 0, "samples", samples, allowed)  # type: ignore[arg-type]
        return own  # type: ignore[return-value]

    def _rows_sent(self, layer: Work, rows: Rows, local: Sequence[int]) -> dict[str, int]:
        """Return what a renewal of rows sends where a layer's workers gather those of all ranks."""
        P, n = self.ranks, self.ranks // self.columns
        # To all ranks how many rows and samples each has; to the workers whether blocks are finite.
        counters = P * (P - 1) * 2 + n * (P - 1) * layer.blocks
        share = rows.share(float(sum(local)), max(local, default=0), P)
        links = layer.blocks * share * share if rows.linked else 0
        sent = {"rows": n * (P - 1) * (share * rows.width + links)} if local else {}
        return {**sent, "inverses": (n - 1) * layer.blocks * (P * share) ** 2, "counters": counters}

    def _shards_sent(self, key: Key) -> int:
        """Return the elements that a step sends of a layer whose parameters are sharded, to its workers and back."""
        layer, served = self.layers[key], set(range(self.ranks)) - set(self.seats[key].workers)
        S = len(layer.shards)
        return self._lacked(key) + sum(layer.shards[rank % S] + layer.replicated for rank in served)

    def _lacked(self, key: Key) -> int:
        """Return the elements of sharded parameters that the workers of a layer do not hold, all workers together."""
        shards = self.layers[key].shards
        return sum(sum(shards) - shards[worker % len(shards)] for worker in self.seats[key].workers)

    def _padding(self) -> int:
        """Return the elements by which a step makes all messages as long as that of the largest shard."""
        if self.columns > 1:
            return 0
        sharded = [work.shards for work in self.layers.values() if work.shards]
        sizes: list[int] = [sum(own) for own in zip(*sharded, strict=True)]
        S = len(sizes) or 1
        return self.ranks // S * (S - 1) * (S * max(sizes, default=0) - sum(sizes))

    def held(self, rank: int) -> int:
        """Return the bytes of running averages and of what renewals have made that `rank` keeps."""
        return self._held[rank % self.columns]

    @cached_property
    def _held(self) -> list[int]:
        """Those of the ranks of each column."""
        held = [sum(self.layers[key].averages for key, seat in self.seats.items() if seat.sums == "all")] * self.columns
        for key, seat in self.seats.items():
            received = 0 if seat.sums == "all" else self.layers[key].averages
            held[self.home(key)] += received + self.layers[key].held
        return held

    def renewal(self, rank: int) -> float:
        """Return the work of a renewal that `rank` does, in the unit of `weights`."""
        return self._renewals[rank]

    @cached_property
    def _renewals(self) -> list[float]:
        renewals, everywhere = [0.0] * self.ranks, [0.0] * self.columns
        for key, seat in self.seats.items():
            for part, owner in seat.owners.items():
                if owner is None:
                    everywhere[self.home(key)] += self.weight(key, part)
                    continue
                renewals[owner] += self.weight(key, part)
        return [own + everywhere[rank % self.columns] for rank, own in enumerate(renewals)]

    def weight(self, key: Key, part: str) -> float:
        """Return the work of a part of a layer, in the unit of `weights`."""
        return self.weights[key] * self.layers[key].parts[part] / (self.layers[key].cost or 1.0)

    @override
    def __rich__(self) -> Table:
        return render(self)

    def __repr__(self) -> str:
        """Say which it is."""
        return f"<Plan {self.placement}: {len(self.seats)} layers on {self.ranks} ranks>"
