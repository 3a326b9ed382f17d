"""A plan as a table: the work of each rank, and the messages."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from natgrad.distributed.plan import Plan

# Tables with more ranks are summarised, and for a rank with more tasks only the first ones are listed.
_RANKS = 16
_NAMED = 4
_MOMENTS = {"factors": "a factor refresh", "inverses": "an inverse refresh", "step": "a step"}


def render(plan: Plan[Any]) -> Table:
    """Return the work and memory of each rank, and the elements of all messages by kind."""
    table = Table.grid(padding=(1, 0))
    table.add_row(_ranks(plan))
    table.add_row(_messages(plan))
    return table


def _ranks(plan: Plan[Any]) -> Table:
    rows = plan.ranks // plan.columns
    title = f"{plan.placement}: {len(plan.assignments)} layers on {plan.ranks} ranks ({rows} x {plan.columns})"
    table = Table(title=escape(title), caption=escape(plan.note) or None)
    table.add_column("rank")
    table.add_column("worker of", justify="right")
    table.add_column("decomposes", overflow="fold")
    table.add_column("work", justify="right")
    table.add_column("holds", justify="right")
    total = sum(plan.weights.values()) or 1.0
    layers = [0] * plan.columns
    for key in plan.assignments:
        layers[plan.column_of(key)] += 1
    tasks, shares = _tasks(plan), [plan.refresh_work(rank) / total for rank in range(plan.ranks)]
    if plan.ranks <= _RANKS:
        for rank, names in enumerate(tasks):
            named = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
            held = mebibytes(plan.held(rank))
            table.add_row(str(rank), _layers(layers[rank % plan.columns]), escape(named), f"{shares[rank]:.1%}", held)
        return table
    works = [float(layers[rank % plan.columns]) for rank in range(plan.ranks)]
    counts, kept = [float(len(names)) for names in tasks], [float(plan.held(rank)) for rank in range(plan.ranks)]
    ways: dict[str, Callable[[list[float]], float]] = {"least": min, "mean": fmean, "most": max}
    for name, way in ways.items():
        table.add_row(
            name, f"{way(works):.4g} layers", f"{way(counts):.4g} parts", f"{way(shares):.2%}", mebibytes(way(kept))
        )
    return table


def _tasks(plan: Plan[Any]) -> list[list[str]]:
    """Return the names of the tasks of each rank."""
    tasks: list[list[str]] = [[] for _ in range(plan.ranks)]
    for key, assignment in plan.assignments.items():
        for part in assignment.owners:
            for rank in assignment.task_ranks(part):
                tasks[rank].append(f"{key}:{part}")
    return tasks


def _messages(plan: Plan[Any]) -> Table:
    table = Table(title="elements sent, all ranks together")
    table.add_column("")
    traffic = plan.traffic()
    for words in _MOMENTS.values():
        table.add_column(words, justify="right")
    for kind in ("factors", "inverses", "gradients", "counters"):
        sent = [elements.get(kind, 0) for elements in traffic.values()]
        table.add_row(kind, *(f"{elements:,}" if elements else "" for elements in sent))
    if any(layer.rows and plan.assignments[key].sums != "alone" for key, layer in plan.layers.items()):
        table.caption = "and rows: plan.traffic(samples=...)"
    return table


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"


def mebibytes(size: float) -> str:
    """Return a number of bytes as text in MiB."""
    return f"{size / 2**20:,.2f} MiB"
