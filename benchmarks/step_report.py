"""The records of `benchmarks.step` and the tables that show them."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """What was measured, beside what the project wants of it (None: nothing)."""

    measured: float
    at_most: float | None = None

    def __str__(self) -> str:
        """Return the figure and, where something is wanted of it, the verdict in Rich's colours."""
        if self.at_most is None:
            return f"{self.measured:.2f}"
        verdict = "[green]met[/]" if self.measured <= self.at_most else "[red]not met[/]"
        return f"{self.measured:.2f} (≤ {self.at_most}: {verdict})"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """natgrad in one form at one setting: milliseconds a step, and ratios (None where kfac-pytorch is missing)."""

    form: str
    intervals: str
    step_ms: float
    added_ms: float
    limit_ms: float
    over_sgd: Figure
    over_limit: Figure
    peer_over_sgd: float | None
    over_peer: Figure | None


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a step of natgrad's time goes to, as shares of the whole step by the part's title."""

    ranks: int
    form: str
    intervals: str
    step_ms: float
    shares: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One workload: times and the medians of every lap in milliseconds."""

    title: str
    sgd_ms: float
    costs: list[Cost]
    parts: list[Parts]
    laps_ms: dict[str, float]


def print_result(result: Result) -> None:
    """Print a workload's tables."""
    console = Console()
    console.print(cost_table(result))
    if result.parts:
        console.print(parts_table(result))


def cost_table(result: Result) -> Table:
    """Return the table of times and ratios."""
    table = Table(
        *("form", "intervals", "step ms", "over SGD", "kfac-pytorch\nover SGD", "added ms", "limit ms"),
        *("added / limit", "added /\nkfac-pytorch's"),
        title=f"{result.title}: an SGD step takes {result.sgd_ms:.1f} ms",
    )
    for row in result.costs:
        times = (f"{value:.1f}" for value in (row.added_ms, row.limit_ms))
        table.add_row(
            *(row.form, row.intervals, f"{row.step_ms:.1f}", str(row.over_sgd), _number(row.peer_over_sgd, ".2f")),
            *(*times, str(row.over_limit), str(row.over_peer or "not installed")),
        )
    return table


def parts_table(result: Result) -> Table:
    """Return the table of what natgrad's time goes to."""
    titles = result.parts[0].shares
    table = Table(
        "ranks", "form", "intervals", "step ms", *titles, title="What natgrad adds, as shares of the whole step"
    )
    for row in result.parts:
        shares = (f"{share:.1%}" for share in row.shares.values())
        table.add_row(str(row.ranks), row.form, row.intervals, f"{row.step_ms:.1f}", *shares)
    return table


def _number(value: float | None, style: str) -> str:
    return "not measured" if value is None else format(value, style)
