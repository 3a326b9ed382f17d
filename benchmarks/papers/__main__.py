"""Run the counterparts of the papers' figures: `python -m benchmarks.papers FIGURE`; without a name it lists them.

Every contender of a figure searches as many learning rates on one seed, then runs with fresh seeds at the best. Runs
are kept in `benchmarks/results/papers.jsonl`, so that an interrupted figure goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.common import RESULTS, conditions, save
from benchmarks.papers.figures import ELSEWHERE, FIGURES, Figure
from benchmarks.papers.runs import Row, run
from natgrad import tasks
from natgrad.cli.report.sheet import Sheet, table
from natgrad.training.journal import Journal

JOURNAL = RESULTS / "papers.jsonl"
PAGE = RESULTS.parent.parent / "docs" / "papers.md"
_HEAD = """# The papers' figures

Made by `python -m benchmarks.papers FIGURE`; the runs are in `benchmarks/results/papers.jsonl`. Models and data are far
smaller than the papers'. Every contender of a figure searches as many learning rates on one seed ("edge": the best is
the least or the greatest of them), and runs with fresh seeds at the best: three, or one where "seeds" has one number
twice; numbers are medians. "To target": what a method needs to reach the reference's median final metric, over what the
reference needs."""


def sheet(figure: Figure, found: Sequence[Row]) -> Sheet:
    """Return the table of a figure."""
    metric = tasks.facts_of(figure.task).metric.name
    asked = figure.measure if figure.measure != "metric" else ""
    headings = ["", "learning rate", metric, "seeds", *([f"{asked} to target"] if asked else []), "paper"]
    cells = []
    for row in found:
        values = (
            ["diverged", ""]
            if row.metric is None or row.spread is None
            else [f"{row.metric:.4g}", f"{row.spread[0]:.4g} to {row.spread[1]:.4g}"]
        )
        ratio = ["missed" if row.ratio is None else f"{row.ratio:.2f}"] if asked else []
        cells.append([row.name, f"{row.rate:g}{' (edge)' if row.at_edge else ''}", *values, *ratio, row.paper])
    return Sheet(
        title=f"{figure.title}. Here: {figure.task}, embedded data",
        headings=tuple(headings),
        rows=cells,
        caption=f"Paper: {figure.paper}",
    )


def write_page() -> None:
    """Write the page of all figures that have been run, and of those that other benchmarks show."""
    parts = [_HEAD]
    found = {name: path for name in FIGURES if (path := RESULTS / f"papers_{name}.json").exists()}
    for name, path in found.items():
        figure = FIGURES[name]
        shown = sheet(figure, [Row(**row) for row in json.loads(path.read_text())["rows"]])
        lines = [shown.headings, ["---"] * len(shown.headings), *shown.rows]
        parts += [f"## {figure.title}", f"`{name}`: {figure.paper}. Here: `{figure.task}`, embedded data."]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        parts += [figure.note] if figure.note else []
    missing = [f"- {each.title}: `{name}`{_length(each)}." for name, each in FIGURES.items() if name not in found]
    parts += ["## Not yet run", "\n".join(missing)] if missing else []
    parts += ["## Elsewhere", "\n".join(f"- {name}: {reason}." for name, reason in ELSEWHERE.items())]
    PAGE.write_text("\n\n".join(parts) + "\n")


def _length(figure: Figure) -> str:
    return "" if figure.hours is None else f", about {figure.hours:g} hours on one processor"


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Figures; left out: list them.")] = None,
    processes: Annotated[int, typer.Option(help="Ranks that train at once.")] = 2,
    journal: Annotated[Path, typer.Option(help="The file of finished runs.")] = JOURNAL,
) -> None:
    """Run figures and print their tables."""
    console = Console(width=140)
    if not names:
        for name, figure in FIGURES.items():
            console.print(f"{name}: {figure.title}", highlight=False)
        for name, reason in ELSEWHERE.items():
            console.print(f"{name}: {reason}", highlight=False)
        return
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: not among {', '.join(FIGURES)}", param_hint="NAMES")
    known = Journal(journal)
    for name in names:
        found = run(FIGURES[name], known, processes=processes)
        console.print(table(sheet(FIGURES[name], found)))
        save(f"papers_{name}", {**conditions(), "rows": [asdict(row) for row in found]})
    write_page()


if __name__ == "__main__":
    typer.run(main)
