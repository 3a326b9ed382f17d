"""The records of `benchmarks.placement` and the tables that show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.step_report import Figure

MISSING = "–"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration at one pair of intervals: medians for a step (None: not measured here).

    Attributes:
        name: The placement, and ", reduce" where natgrad averages the gradients; kfac-pytorch's, or DDP alone.
        intervals: Those of factors and inverses.
        milliseconds: Of the slowest rank.
        over_ddp: That over plain DDP's.
        over_comm_opt: That over comm-opt's, which shares the wrapper and the mathematics.
        over_peer: That over kfac-pytorch's same placement.
        over_limit: That over plain DDP's with the bare calls that are this placement's own work.
        exposed_ms: Host time in collectives, mean of the ranks.
        sent_mb: What all ranks together hand to collectives, by natgrad's own count; DDP's gradients are not in it.
        wire_mb: What the interfaces of all nodes send.
        cpu_seconds: Processor time of a rank, mean of the ranks.
        cpu_over_ddp: That over plain DDP's.
    """

    name: str
    intervals: str
    milliseconds: float | None
    over_ddp: float | None
    over_comm_opt: float | None
    over_peer: float | None
    over_limit: float | None
    exposed_ms: float | None
    sent_mb: float | None
    wire_mb: float | None
    cpu_seconds: float
    cpu_over_ddp: float


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the project wants of a placement, beside what was measured."""

    name: str
    intervals: str
    over: str
    figure: Figure


@dataclass(frozen=True, kw_only=True)
class Result:
    """One workload.

    Attributes:
        title: Of the workload.
        rounds: Over which the medians are taken.
        rows: Every configuration at every pair of intervals.
        wanted: What the project wants.
        refused: Why natgrad does not know a configuration yet, by name.
        memory_mib: Peak resident memory of the rank that needs most, by configuration.
        figures: How they were written down, where not by the run itself.
    """

    title: str
    rounds: int
    rows: list[Row]
    wanted: list[Wanted]
    refused: dict[str, str]
    memory_mib: dict[str, float]
    figures: str | None = None

    @staticmethod
    def read(stored: Mapping[str, Any]) -> Result:
        """Return the result that a file has as a dictionary."""
        rows = [Row(**row) for row in stored["rows"]]
        aims = [Wanted(**{**aim, "figure": Figure(**aim["figure"])}) for aim in stored["wanted"]]
        return Result(**{**stored, "rows": rows, "wanted": aims})


def print_result(result: Result) -> None:
    """Print a workload's tables."""
    console = Console()
    for intervals in dict.fromkeys(row.intervals for row in result.rows):
        console.print(cost_table(result, intervals))
    if result.memory_mib:
        console.print(memory_table(result))
    if result.wanted:
        console.print(wanted_table(result))
    for name, reason in result.refused.items():
        console.print(f"skipped {name}: {reason}", markup=False, highlight=False)


def cost_table(result: Result, intervals: str) -> Table:
    """Return the table of times, messages and processor time at one pair of intervals."""
    table = Table(
        *(
            "configuration",
            "step ms",
            "over DDP",
            "over\ncomm-opt",
            "over same of\nkfac-pytorch",
            "over DDP +\nown work",
        ),
        *("exposed ms", "sent MB", "on the\nwire MB", "CPU s", "CPU\nover DDP"),
        title=f"{result.title}: a step at {intervals}",
    )
    for row in result.rows:
        if row.intervals == intervals:
            ratios = (row.over_ddp, row.over_comm_opt, row.over_peer, row.over_limit)
            table.add_row(
                *(row.name, _number(row.milliseconds, ".1f"), *(_number(ratio, ".2f") for ratio in ratios)),
                *(_number(row.exposed_ms, ".1f"), _number(row.sent_mb, ".2f"), _number(row.wire_mb, ".2f")),
                *(_number(row.cpu_seconds, ".3f"), _number(row.cpu_over_ddp, ".2f")),
            )
    return table


def memory_table(result: Result) -> Table:
    """Return the table of peak memory and of what each configuration adds to plain DDP's."""
    table = Table("configuration", "peak MiB", "added MiB", title=f"{result.title}: memory of a rank")
    base = result.memory_mib["DDP"]
    for name, peak in result.memory_mib.items():
        table.add_row(name, f"{peak:.0f}", f"{peak - base:.0f}")
    return table


def wanted_table(result: Result) -> Table:
    """Return the table of what the project wants."""
    table = Table("configuration", "intervals", "time over that of", "ratio", title=f"{result.title}: wanted")
    for row in result.wanted:
        table.add_row(row.name, row.intervals, row.over, str(row.figure))
    return table


def wanted(rows: list[Row], at_most: Mapping[tuple[str, str, str], float]) -> list[Wanted]:
    """Return what is wanted of the rows that were timed.

    Args:
        rows: Any.
        at_most: The greatest ratio that is wanted, by configuration, intervals and what it is over: "comm-opt",
            "kfac-pytorch" or "limit".
    """
    found = []
    for row in rows:
        ratios = {"comm-opt": row.over_comm_opt, "kfac-pytorch": row.over_peer, "limit": row.over_limit}
        for over, ratio in ratios.items():
            bound = at_most.get((row.name, row.intervals, over))
            if bound is not None and ratio is not None:
                found.append(Wanted(name=row.name, intervals=row.intervals, over=over, figure=Figure(ratio, bound)))
    return found


def _number(value: float | None, style: str) -> str:
    return MISSING if value is None else format(value, style)
