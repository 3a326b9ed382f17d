"""The plan of a placement: the ranks of each layer, the sizes of messages, the bytes held. It needs no processes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Generic, Literal, TypeVar

from rich.markup import escape
from rich.table import Table
from typing_extensions import override

from natgrad.distributed.buckets import Slices
from natgrad.distributed.options import Placement
from natgrad.distributed.rules import LayerDemand, Summed
from natgrad.errors import require
from natgrad.printed import Printed

Key = TypeVar("Key", bound=Hashable)
Moment = Literal["factors", "inverses", "step"]

# Tables with more ranks are summarised, and for a rank with more tasks only the first ones are listed.
_RANKS = 16
_NAMED = 4


@dataclass(frozen=True)
class Assignment:
    """The ranks of one layer.

    Attributes:
        workers: The ranks that hold the layer's decompositions and precondition its gradient, ascending.
        owners: For each task the worker that runs it.
        sums: Where the statistics are summed: on "all" ranks, or on the only "worker". "alone": the worker uses the
            samples of its rank. "later": on all ranks, when decompositions are due. Rows of samples are sent to each
            "worker", or, with "alone", not sent.
    """

    workers: tuple[int, ...]
    owners: Mapping[str, int]
    sums: Summed = "all"

    @property
    def keeps_everywhere(self) -> bool:
        """Whether all ranks keep the running averages, or parts of them."""
        return self.sums in ("all", "later")


@dataclass(frozen=True)
class Collective:
    """A collective of `ranks` on a flat bucket.

    `sizes` is the number of elements of an all-reduce, or a tuple of the numbers that the ranks own. In the latter case
    owners receive sums (`reduces`) or send their elements to all ranks. `kind` is that of the messages.
    """

    ranks: Sequence[int]
    sizes: int | tuple[int, ...]
    reduces: bool = False
    kind: str = "factors"

    @cached_property
    def _slices(self) -> Slices:
        assert isinstance(self.sizes, tuple)
        return Slices(self.sizes)

    def sent(self, rank: int) -> float:
        """Return the number of elements that a rank sends."""
        if rank not in self.ranks:
            return 0
        if isinstance(self.sizes, int):
            return 2 * (len(self.ranks) - 1) / len(self.ranks) * self.sizes
        place = self.ranks.index(rank)
        return self._slices.sent(place) if self.reduces else self._slices.received(place)


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
        note: The name of the placement, and the reason if "auto" has not taken its first choice.
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

    @property
    def defers(self) -> bool:
        """Whether the sums of any layer wait until decompositions are due."""
        return any(assignment.sums == "later" for assignment in self.assignments.values())

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
        return self.assignments[key].keeps_everywhere or self.is_gradient_worker(key, rank)

    def accumulates(self, key: Key, rank: int) -> bool:
        """Return whether the sums of a layer include the samples of `rank`."""
        return self.assignments[key].sums != "alone" or self.is_gradient_worker(key, rank)

    def traffic(self) -> dict[Moment, dict[str, int]]:
        """Return the number of elements that all ranks send in the collectives of `exchanges`, by moment and kind."""
        usual: dict[Moment, str] = {"factors": "factors", "inverses": "inverses", "step": "gradients"}
        found: dict[Moment, dict[str, int]] = {}
        for moment, exchanges in self.exchanges().items():
            sent = dict.fromkeys((usual[moment], *(exchange.kind for exchange in exchanges)), 0.0)
            for exchange in exchanges:
                sent[exchange.kind] += sum(map(exchange.sent, exchange.ranks))
            found[moment] = {kind: round(elements) for kind, elements in sent.items()}
        return found

    def exchanges(self) -> dict[Moment, list[Collective]]:
        """Return the collectives on flat buckets: sums, results and preconditioned gradients, with their counters.

        The moments are a factor refresh ("factors"), an inverse refresh ("inverses") and every step ("step").
        Symmetric matrices are sent as triangles. Not included are rows of samples with their kernels, gradients of a
        model that FSDP2 shards, gradients that are averaged, and a few counters at the start of training.
        """
        inverses = [*self._deferred_exchanges(), *self._result_exchanges()]
        return {"factors": self._sum_exchanges(), "inverses": inverses, "step": self._step_exchanges()}

    def _sum_exchanges(self) -> list[Collective]:
        """Return the messages of sums, with the samples and rows of each layer; for deferred ones with these alone.

        With the samples and rows of each block goes whether its sums are finite.
        """
        everywhere, owned, ranks = 0, [0] * self.ranks, range(self.ranks)
        for key, layer in self.layers.items() if self.ranks > 1 else ():
            where = self.assignments[key].sums if layer.sums else "alone"
            if where == "all":
                everywhere += layer.sums + 2
            elif where == "later":
                everywhere += 3 * layer.blocks
            elif where == "worker":
                owned[self.column_of(key)] += layer.sums + 2
        found = [Collective(ranks, everywhere)] if everywhere else []
        return [*found, Collective(ranks, tuple(owned), reduces=True)] if any(owned) else found

    def _deferred_exchanges(self) -> list[Collective]:
        """Return the messages of running averages whose parts are summed when decompositions are due."""
        waiting = sum(layer.sums for key, layer in self.layers.items() if self.assignments[key].sums == "later")
        return [Collective(range(self.ranks), waiting)] if waiting else []

    def _result_exchanges(self) -> list[Collective]:
        """Return the messages of results, with the success of each block, within each column."""
        owned, q = [0] * self.ranks, self.columns
        for key, layer in self.layers.items():
            for part, owner in self.assignments[key].owners.items() if layer.rows is None else ():
                owned[owner] += layer.results.get(part, 0) + layer.blocks
        if q == self.ranks or not any(owned):
            return []
        return [Collective(self.column(column), tuple(owned[column::q]), kind="inverses") for column in range(q)]

    def _step_exchanges(self) -> list[Collective]:
        """Return the messages of preconditioned gradients, within each row.

        Each has ⟨V, W⟩ of each block, and the level and the failures of each layer.
        """
        if self.columns == 1 or any(layer.is_sharded for layer in self.layers.values()):
            return []
        owned = [0] * self.columns
        for key, layer in self.layers.items():
            owned[self.column_of(key)] += layer.gradients + layer.blocks + 2
        rows = range(0, self.ranks, self.columns)
        return [Collective(self.row(start), tuple(owned), kind="gradients") for start in rows]

    def held(self, rank: int) -> int:
        """Return the bytes of running averages and decompositions on `rank`, and of the rows of the last refresh."""
        return self._held[rank % self.columns]

    @property
    def most_held(self) -> int:
        """The bytes on the rank that holds most."""
        return max(self._held)

    @cached_property
    def _held(self) -> list[int]:
        """The bytes of running averages, decompositions and rows on a rank of each column."""
        held, everywhere = [0] * self.columns, 0
        for key, assignment in self.assignments.items():
            layer, column = self.layers[key], self.column_of(key)
            held[column] += layer.held
            if layer.rows is not None and key in self.rows:
                held[column] += layer.rows(self.rows[key])
            if assignment.keeps_everywhere:
                everywhere += layer.averages
            else:
                held[column] += layer.averages
        return [everywhere + size for size in held]

    def check_memory(self) -> None:
        """Check that no rank holds more than `Placement.memory`.

        Raises:
            ValueError: if one does.
        """
        limit, rows = self.placement.memory, " with the rows of this batch" if self.rows else ""
        fits = limit is None or self.most_held <= limit
        remedy = "precision='bfloat16' takes less, and on several ranks Placement('mem-opt', memory=...)"
        allowed = f"at least {self.most_held} bytes, which '{self.placement}' holds{rows}; {remedy}"
        require(fits, "memory", limit, allowed)

    def refresh_work(self, rank: int) -> float:
        """Return the work of an inverse refresh on `rank`, in the unit of `weights`."""
        return self._refresh_works[rank]

    @cached_property
    def _refresh_works(self) -> list[float]:
        works = [0.0] * self.ranks
        for key, assignment in self.assignments.items():
            for part, owner in assignment.owners.items():
                works[owner] += self.weight(key, part)
        return works

    def weight(self, key: Key, part: str) -> float:
        """Return the work of a task of a layer, in the unit of `weights`."""
        return self.weights[key] * self.layers[key].parts[part] / (self.layers[key].cost or 1.0)

    @override
    def __rich__(self) -> Table:
        table = Table.grid(padding=(1, 0))
        table.add_row(self._rank_table())
        table.add_row(self._message_table())
        return table

    def __repr__(self) -> str:
        """Return the placement and the numbers of layers and ranks."""
        return f"<Plan {self.placement}: {len(self.assignments)} layers on {self.ranks} ranks>"

    def _rank_table(self) -> Table:
        """Return the work and memory of each rank; of many ranks the least, mean and most."""
        rows = self.ranks // self.columns
        title = f"{self.placement}: {len(self.assignments)} layers on {self.ranks} rank{'s' if self.ranks > 1 else ''}"
        title += f", {rows} worker{'s' if rows > 1 else ''} each" if self.ranks > 1 else ""
        table = Table(title=escape(title), caption=escape(self.note) or None)
        table.add_column("rank")
        table.add_column("worker of", justify="right")
        table.add_column("decomposes", overflow="fold")
        table.add_column("work", justify="right")
        table.add_column("holds", justify="right")
        layers, tasks = [0] * self.columns, [list[str]() for _ in range(self.ranks)]
        for key, assignment in self.assignments.items():
            layers[self.column_of(key)] += 1
            for part, owner in assignment.owners.items():
                tasks[owner].append(f"{key}:{part}")
        total = sum(self.weights.values()) or 1.0
        if self.ranks <= _RANKS:
            for rank, names in enumerate(tasks):
                named = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
                count = layers[rank % self.columns]
                shown = f"{count} layer{'' if count == 1 else 's'}"
                share = f"{self.refresh_work(rank) / total:.1%}"
                table.add_row(str(rank), shown, escape(named), share, mebibytes(self.held(rank)))
            return table
        counts, works = [float(len(names)) for names in tasks], [work / total for work in self._refresh_works]
        ways: dict[str, Callable[[Sequence[float]], float]] = {"least": min, "mean": fmean, "most": max}
        for name, way in ways.items():
            shown, named = f"{way(layers):.4g} layers", f"{way(counts):.4g} parts"
            table.add_row(name, shown, named, f"{way(works):.2%}", mebibytes(way(self._held)))
        return table

    def _message_table(self) -> Table:
        table = Table("", "elements", title="sent by all ranks together")
        words: dict[Moment, str] = {"factors": "a factor refresh", "inverses": "an inverse refresh", "step": "a step"}
        for moment, kinds in self.traffic().items():
            for kind, elements in kinds.items():
                table.add_row(f"{words[moment]}: {kind}", f"{elements:,}")
        return table


def mebibytes(size: float) -> str:
    """Return a number of bytes as text in MiB."""
    return f"{size / 2**20:,.2f} MiB"
