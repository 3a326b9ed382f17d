"""A plan as a table: what each rank does, and what is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from natgrad.distributed.plan import Plan

# Tables with more ranks are summarised; of a rank with more tasks the first ones are named.
_RANKS = 16
_NAMED = 4
_MOMENTS = {"factors": "a factor refresh", "inverses": "an inverse refresh", "step": "a step"}


def render(plan: Plan[Any]) -> Table:
    """Return the work and memory of each rank, and below them the elements of all messages by kind."""
    table = Table.grid(padding=(1, 0))
    table.add_row(_ranks(plan))
    table.add_row(_messages(plan))
    return table


def _ranks(plan: Plan[Any]) -> Table:
    rows = plan.ranks // plan.columns
    title = f"{plan.placement}: {len(plan.seats)} layers on {plan.ranks} ranks ({rows} x {plan.columns})"
    table = Table(title=escape(title), caption=escape(plan.note) or None)
    table.add_column("rank")
    table.add_column("works for", justify="right")
    table.add_column("renews", overflow="fold")
    table.add_column("work", justify="right")
    table.add_column("holds", justify="right")
    total = sum(plan.weights.values()) or 1.0
    layers = [0] * plan.columns
    for key in plan.seats:
        layers[plan.column_of(key)] += 1
    if plan.ranks <= _RANKS:
        parts = _parts(plan)
        for rank in range(plan.ranks):
            share, held = plan.renewal(rank) / total, mebibytes(plan.held(rank))
            table.add_row(str(rank), _layers(layers[rank % plan.columns]), parts[rank], f"{share:.1%}", held)
        return table
    ways: dict[str, Callable[[list[float]], float]] = {"least": min, "mean": _mean, "most": max}
    works = [float(layers[rank % plan.columns]) for rank in range(plan.ranks)]
    counts, shares = [0.0] * plan.ranks, [plan.renewal(rank) / total for rank in range(plan.ranks)]
    for seat in plan.seats.values():
        for part in seat.owners:
            for rank in seat.renewers(part):
                counts[rank] += 1
    kept = [float(plan.held(rank)) for rank in range(plan.ranks)]
    for name, way in ways.items():
        table.add_row(
            name, f"{way(works):.4g} layers", f"{way(counts):.4g} parts", f"{way(shares):.2%}", mebibytes(way(kept))
        )
    return table


def _parts(plan: Plan[Any]) -> list[str]:
    """Return the tasks of each rank, in words."""
    own: list[list[str]] = [[] for _ in range(plan.ranks)]
    for key, seat in plan.seats.items():
        for part in seat.owners:
            for rank in seat.renewers(part):
                own[rank].append(f"{key}:{part}")
    return [
        escape(", ".join(parts[:_NAMED])) + (f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else "")
        for parts in own
    ]


def _messages(plan: Plan[Any]) -> Table:
    table = Table(title="elements sent, all ranks together")
    table.add_column("")
    traffic = plan.traffic()
    for words in _MOMENTS.values():
        table.add_column(words, justify="right")
    for kind in ("factors", "replay", "inverses", "gradients", "counters"):
        sent = [own.get(kind, 0) for own in traffic.values()]
        if kind != "replay" or any(sent):
            table.add_row(kind, *(f"{elements:,}" if elements else "" for elements in sent))
    if any(layer.rows and plan.seats[key].sums != "alone" for key, layer in plan.layers.items()):
        table.caption = "and rows: plan.traffic(samples=...)"
    return table


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def mebibytes(size: float) -> str:
    """Return a number of bytes in MiB, in words."""
    return f"{size / 2**20:,.2f} MiB"
