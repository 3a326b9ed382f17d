"""The plan of a placement: the ranks of each layer, and the sizes of all messages. It needs no processes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, Literal, TypeVar

from rich.table import Table
from typing_extensions import override

from natgrad.distributed.options import Placement
from natgrad.distributed.slices import Slices
from natgrad.distributed.table import render
from natgrad.errors import require
from natgrad.printed import Printed

Key = TypeVar("Key", bound=Hashable)
Moment = Literal["factors", "inverses", "step"]


@dataclass(frozen=True, kw_only=True)
class RowDemand:
    """The rows of samples that a layer sends in place of sums (SNGD, HyLo).

    Attributes:
        width: The number of elements of a sample's rows of inputs and output gradients, in all blocks.
        share: Returns the number of samples that each rank selects, from the number of samples on all ranks, the
            largest number on any rank, and the number of ranks.
        held: Returns the bytes of the rows of this number of samples, and of their kernels, on a worker.
        linked: Whether a selection may have a matrix that relates it to the other rows (HyLo's Y).
    """

    width: int
    share: Callable[[float, int, int], int]
    held: Callable[[int], int]
    linked: bool


@dataclass(frozen=True, kw_only=True)
class LayerDemand:
    """The work, messages and memory of a layer.

    Attributes:
        parts: The work of each task, in multiply-adds.
        sums: The number of elements of its statistics in messages (triangles of symmetric matrices).
        results: The number of elements of the result of each task in messages.
        rows: The rows of samples, if they are sent in place of sums.
        gradients: The number of elements of its gradient.
        shards: The number of elements of its sharded parameters on each of the S shards. Empty: none is sharded.
        replicated: The number of elements of its other parameters, if some are sharded.
        blocks: The number of its blocks, whose decompositions may fail separately.
        averages: The bytes of its running averages.
        held: The bytes of the results of its tasks on a worker, without `rows`.
        wire: The bytes of an element of its results in messages.
        alone: Whether the samples of one rank are sufficient for its statistics. They are not for embedding tables, of
            which a rank looks up few rows.
    """

    parts: Mapping[str, float]
    sums: int = 0
    results: Mapping[str, int] = field(default_factory=dict)
    rows: RowDemand | None = None
    gradients: int = 0
    shards: tuple[int, ...] = ()
    replicated: int = 0
    blocks: int = 1
    averages: int = 0
    held: int = 0
    wire: int = 4
    alone: bool = True

    @property
    def cost(self) -> float:
        """The work of all tasks."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Assignment:
    """The ranks of one layer.

    Attributes:
        workers: The ranks that hold the layer's decompositions and precondition its gradient, ascending.
        owners: For each task the worker that runs it. None: every worker runs it.
        sums: Where the statistics are summed: on "all" ranks, or on the only "worker". "alone": the worker uses the
            samples of its rank. Rows of samples are sent to each "worker", or, with "alone", not sent.
    """

    workers: tuple[int, ...]
    owners: Mapping[str, int | None]
    sums: Literal["all", "worker", "alone"] = "all"

    def task_ranks(self, part: str) -> tuple[int, ...]:
        """Return the workers that run a task."""
        owner = self.owners[part]
        return self.workers if owner is None else (owner,)


@dataclass(frozen=True)
class Collective:
    """A collective on a flat bucket.

    Attributes:
        kind: The kind of its bytes in `Plan.traffic`.
        ranks: The ranks that take part.
        sizes: The number of elements of an all-reduce, or the number that each rank owns.
        reduces: Whether owners receive sums. Otherwise they send their elements to all ranks.
    """

    kind: str
    ranks: Sequence[int]
    sizes: int | tuple[int, ...]
    reduces: bool = False

    @cached_property
    def _slices(self) -> Slices:
        assert isinstance(self.sizes, tuple)
        return Slices(self.sizes)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    @property
    def elements(self) -> int:
        """The number of elements of the bucket."""
        return self.sizes if isinstance(self.sizes, int) else sum(self.sizes)

    def sent(self, rank: int) -> float:
        """Return the number of elements that a rank sends."""
        return self._moved(rank, sends=True)

    def received(self, rank: int) -> float:
        """Return the number of elements that a rank receives."""
        return self._moved(rank, sends=False)

    def _moved(self, rank: int, *, sends: bool) -> float:
        if rank not in self._places:
            return 0
        if isinstance(self.sizes, int):
            return 2 * (len(self.ranks) - 1) / len(self.ranks) * self.sizes
        place = self._places[rank]
        return self._slices.sent(place) if sends == self.reduces else self._slices.received(place)


@dataclass(frozen=True, repr=False)
class Plan(Printed, Generic[Key]):
    """The assignment of all layers on a grid of P ranks (KAISA): rank = row · q + column.

    The workers of a layer are a column. Each sends the preconditioned gradient to the other ranks of its row. ``str()``
    returns a table of each rank's work and the messages, which Rich can render too.

    Attributes:
        placement: The placement, or the choice of "auto".
        ranks: The number of ranks, P.
        columns: The number of columns, q.
        seats: The assignment of each layer, also named `assignments`.
        layers: The demand of each layer.
        weights: The work of each layer, measured or modelled.
        note: The name of the placement, and the reason if "auto" has not chosen "comm-opt".
        rows: The number of gathered rows of each layer in the last refresh (SNGD, HyLo). Empty before the first.
    """

    placement: Placement
    ranks: int
    columns: int
    seats: Mapping[Key, Assignment]
    layers: Mapping[Key, LayerDemand]
    weights: Mapping[Key, float]
    note: str = ""
    rows: Mapping[Key, int] = field(default_factory=dict)

    @property
    def assignments(self) -> Mapping[Key, Assignment]:
        """The assignment of each layer."""
        return self.seats

    def row(self, rank: int) -> range:
        """Return the ranks of the row of `rank`."""
        start = rank - rank % self.columns
        return range(start, start + self.columns)

    def column(self, rank: int) -> range:
        """Return the ranks that are workers of the same layers as `rank`."""
        return range(rank % self.columns, self.ranks, self.columns)

    def server(self, key: Key, rank: int) -> int:
        """Return the worker of a layer in the row of `rank`, which sends `rank` the preconditioned gradient."""
        return rank - rank % self.columns + self.column_of(key)

    def column_of(self, key: Key) -> int:
        """Return the column of a layer."""
        return self.assignments[key].workers[0] % self.columns

    def is_gradient_worker(self, key: Key, rank: int) -> bool:
        """Return whether `rank` is a worker of a layer."""
        return self.server(key, rank) == rank

    def keeps_averages(self, key: Key, rank: int) -> bool:
        """Return whether `rank` receives the sums of a layer and keeps their running averages."""
        return self.assignments[key].sums == "all" or self.is_gradient_worker(key, rank)

    def accumulates(self, key: Key, rank: int) -> bool:
        """Return whether the sums of a layer include the samples of `rank`."""
        return self.assignments[key].sums != "alone" or self.is_gradient_worker(key, rank)

    def traffic(self, samples: int | Sequence[int] | None = None) -> dict[Moment, dict[str, int]]:
        """Return the number of elements sent by all ranks, by moment and kind of message.

        Symmetric matrices count as triangles, an all-reduce of n elements as 2 (P - 1) n, a copy of n elements as n.
        The moments are a factor refresh ("factors"), an inverse refresh ("inverses") and every step ("step"). Each
        includes counters.

        A few counters at the start of training and gradients that the model's wrapper averages are not included.
        Gradients that FSDP2 shards are sent to the workers by rows, where rank r has the shard r mod S.

        Args:
            samples: The number of samples of a batch, distributed evenly over the ranks, or the number on each rank. It
                determines the number of "rows" and the sizes of their kernels. None: both are not included. For HyLo
                that switches methods, traffic is that of a critical epoch, which is larger.

        Raises:
            ValueError: if `samples` is not allowed.
        """
        found: dict[Moment, dict[str, int]] = {
            "factors": {"factors": 0, "counters": 0},
            "inverses": {"inverses": 0, "counters": 0},
            "step": {"gradients": 0, "counters": 0},
        }
        for moment, exchanges in self.exchanges(samples).items():
            for exchange in exchanges:
                sent = sum(map(exchange.sent, exchange.ranks))
                found[moment][exchange.kind] = found[moment].get(exchange.kind, 0) + round(sent)
        for kind, elements in self._rows_sent(self._local(samples)).items():
            found["inverses"][kind] = found["inverses"].get(kind, 0) + elements
        for key, layer in self.layers.items():
            if self._sends_rows:
                whole = self._served * layer.gradients
                found["step"]["gradients"] += self._shards_sent(key) if layer.shards else whole
                found["step"]["counters"] += self._served * (layer.blocks + 2)
        return found

    def exchanges(self, samples: int | Sequence[int] | None = None) -> dict[Moment, list[Collective]]:
        """Return the collectives on flat buckets: sums, results and preconditioned gradients.

        Rows of samples and sharded gradients are not included.

        Args:
            samples: As in `traffic`.
        """
        local = self._local(samples)
        rows = [self.row(rank) for rank in range(0, self.ranks, self.columns)]
        inverses, step = [], []
        if self.columns < self.ranks:
            for gathers in (False, True):
                sizes, flags = self._results(local, gathers=gathers)
                for column in range(self.columns) if any(flags) else ():
                    workers = range(column, self.ranks, self.columns)
                    for kind, owned in (("inverses", sizes), ("counters", flags)):
                        inverses.append(Collective(kind, workers, tuple(owned[column :: self.columns])))
        if self.columns > 1 and not self._sends_rows:
            gradients, counters = [0] * self.columns, [0] * self.columns
            for key, layer in self.layers.items():
                gradients[self.column_of(key)] += layer.gradients
                # ⟨V, W⟩ of each block, and the level and the failures of the layer.
                counters[self.column_of(key)] += layer.blocks + 2
            for row in rows:
                step += [Collective("gradients", row, tuple(gradients)), Collective("counters", row, tuple(counters))]
        found: dict[Moment, list[Collective]] = {
            "factors": self._sum_exchanges(),
            "inverses": inverses,
            "step": step,
        }
        return found

    def _sum_exchanges(self) -> list[Collective]:
        """Return the messages of sums, with the samples and rows of each layer."""
        every: list[Collective] = []
        everywhere, layers = 0, 0
        owned, counters = [0] * self.ranks, [0] * self.ranks
        for key, layer in self.layers.items() if self.ranks > 1 else ():
            where = self.assignments[key].sums if layer.sums else "alone"
            if where == "all":
                everywhere, layers = everywhere + layer.sums, layers + 1
            elif where == "worker":
                owned[self.column_of(key)] += layer.sums
                counters[self.column_of(key)] += 2
        ranks = range(self.ranks)
        if layers:
            every += [Collective("factors", ranks, everywhere), Collective("counters", ranks, 2 * layers)]
        if any(owned):
            every += [
                Collective("factors", ranks, tuple(owned), True),
                Collective("counters", ranks, tuple(counters), True),
            ]
        return every

    def _results(self, local: Sequence[int], *, gathers: bool) -> tuple[list[int], list[int]]:
        """Return the elements of results that each rank sends, and the number of blocks whose success it reports.

        `gathers`: for layers whose statistics are gathered; otherwise for all others.
        """
        sizes, flags = [0] * self.ranks, [0] * self.ranks
        for key, assignment in self.assignments.items():
            layer = self.layers[key]
            kernel = layer.blocks * (self.ranks * self._selected(key, local)) ** 2
            for part, owner in assignment.owners.items() if gathers == (layer.rows is not None) else ():
                if owner is not None:
                    sizes[owner] += layer.results.get(part, 0) + kernel
                    flags[owner] += layer.blocks
        return sizes, flags

    def _selected(self, key: Key, local: Sequence[int]) -> int:
        """Return the number of rows of a layer that each rank sends; 0 if none are sent or samples are unknown."""
        rows = self.layers[key].rows
        if rows is None or not local or self.assignments[key].sums == "alone":
            return 0
        return rows.share(float(sum(local)), max(local), self.ranks)

    def _local(self, samples: int | Sequence[int] | None) -> Sequence[int]:
        """Return the number of samples on each rank; empty where it is unknown."""
        if samples is None:
            return ()
        P, local = self.ranks, samples
        if isinstance(local, int) and not isinstance(local, bool):
            local = [local // P + (rank < local % P) for rank in range(P)]
        fits = isinstance(local, Sequence) and len(local) == P and all(isinstance(n, int) and n >= 0 for n in local)
        allowed = f"None, a whole number >= 1, or a whole number >= 0 for each of the {P} ranks"
        require(fits and sum(local) > 0, "samples", samples, allowed)  # type: ignore[arg-type]
        return local  # type: ignore[return-value]

    def _rows_sent(self, local: Sequence[int]) -> dict[str, int]:
        """Return the elements that a refresh of rows sends, without the kernels."""
        P, n = self.ranks, self.ranks // self.columns
        found: dict[str, int] = {}
        for key, layer in self.layers.items():
            if layer.rows is None or self.assignments[key].sums == "alone":
                continue
            # All ranks receive the numbers of rows and samples, and workers whether each block is finite.
            found["counters"] = found.get("counters", 0) + P * (P - 1) * 2 + n * (P - 1) * layer.blocks
            if local:
                share = self._selected(key, local)
                links = layer.blocks * share * share if layer.rows.linked else 0
                found["rows"] = found.get("rows", 0) + n * (P - 1) * (share * layer.rows.width + links)
        return found

    @cached_property
    def _sends_rows(self) -> bool:
        """Whether gradients are sent by rows, because FSDP2 shards a layer."""
        return any(layer.shards for layer in self.layers.values())

    @property
    def _served(self) -> int:
        """The number of ranks that receive the preconditioned gradient of a layer."""
        return self.ranks - self.ranks // self.columns

    def _shards_sent(self, key: Key) -> int:
        """Return the elements that a step sends for a sharded layer, to its workers and back."""
        layer, served = self.layers[key], set(range(self.ranks)) - set(self.assignments[key].workers)
        S = len(layer.shards)
        return self._lacked(key) + sum(layer.shards[rank % S] + layer.replicated for rank in served)

    def _lacked(self, key: Key) -> int:
        """Return the elements of a layer's sharded parameters that its workers do not hold, summed over workers."""
        shards = self.layers[key].shards
        return sum(sum(shards) - shards[worker % len(shards)] for worker in self.assignments[key].workers)

    def held(self, rank: int) -> int:
        """Return the bytes of running averages and decompositions on `rank`, and of the rows of the last refresh."""
        return self._held[rank % self.columns]

    @property
    def most_held(self) -> int:
        """The bytes on the rank that holds most."""
        return max(self._held)

    @cached_property
    def _held(self) -> list[int]:
        """The bytes of running averages, decompositions and rows on each rank of a row of the grid."""
        held = [
            sum(self.layers[key].averages for key, assignment in self.assignments.items() if assignment.sums == "all")
        ] * self.columns
        for key, assignment in self.assignments.items():
            layer, column = self.layers[key], self.column_of(key)
            held[column] += layer.held + (0 if assignment.sums == "all" else layer.averages)
            if layer.rows is not None and key in self.rows:
                held[column] += layer.rows.held(self.rows[key])
        return held

    def check_memory(self) -> None:
        """Check that no rank holds more than `Placement.memory`.

        Raises:
            ValueError: if one does.
        """
        limit, rows = self.placement.memory, " with the rows of this batch" if self.rows else ""
        fits = limit is None or self.most_held <= limit
        require(fits, "memory", limit, f"at least {self.most_held} bytes, which '{self.placement}' holds{rows}")

    def refresh_work(self, rank: int) -> float:
        """Return the work of an inverse refresh on `rank`, in the unit of `weights`."""
        return self._refresh_works[rank]

    @cached_property
    def _refresh_works(self) -> list[float]:
        owned, everywhere = [0.0] * self.ranks, [0.0] * self.columns
        for key, assignment in self.assignments.items():
            for part, owner in assignment.owners.items():
                if owner is None:
                    everywhere[self.column_of(key)] += self.weight(key, part)
                    continue
                owned[owner] += self.weight(key, part)
        return [work + everywhere[rank % self.columns] for rank, work in enumerate(owned)]

    def weight(self, key: Key, part: str) -> float:
        """Return the work of a task of a layer, in the unit of `weights`."""
        return self.weights[key] * self.layers[key].parts[part] / (self.layers[key].cost or 1.0)

    @override
    def __rich__(self) -> Table:
        return render(self)

    def __repr__(self) -> str:
        """Return the placement and the numbers of layers and ranks."""
        return f"<Plan {self.placement}: {len(self.assignments)} layers on {self.ranks} ranks>"
