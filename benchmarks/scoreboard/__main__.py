"""The command line of the scoreboard.

    python -m benchmarks.scoreboard [--tasks digits,text] [--methods adamw,muon] [--horizon 1] [--workers 2]
    python -m benchmarks.scoreboard --report     # page and plots anew from the result file
    python -m benchmarks.scoreboard --smoke      # two tasks, a few steps

Every run is a line of the journal, and is not repeated. The journal does not see changes of natgrad's code: after one,
forget the runs of the method with `--again natural-muon`. Results of all tasks and methods go to
benchmarks/results/scoreboard.json, docs/scoreboard.md and docs/images/; those of a part lie beside the journal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.common import RESULTS
from benchmarks.scoreboard import report, timing
from benchmarks.scoreboard.journal import Journal
from benchmarks.scoreboard.methods import METHODS
from benchmarks.scoreboard.run import EVALUATIONS
from benchmarks.scoreboard.search import LONG_HORIZON, Board, Scale
from benchmarks.scoreboard.tasks import TASKS

ROOT = RESULTS.parents[1]
SMOKE_TASKS, SMOKE_METHODS, SMOKE_STEPS = ("poisson", "tabular"), ("adamw", "natural-muon"), EVALUATIONS


def chosen(names: str, known: dict[str, Any], option: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list; all, if it is empty."""
    wanted = tuple(filter(None, names.split(",")))
    for name in wanted:
        if name not in known:
            raise typer.BadParameter(f"{name}: one of {', '.join(known)}", param_hint=option)
    return tuple(name for name in known if name in wanted) or tuple(known)


def measure(board: Board, console: Console, *, smoke: bool) -> None:
    """Time the steps and measure the memory of tasks where that is not known for all methods."""
    methods = board.scale.methods
    for task in board.scale.tasks:
        revisions = [TASKS[task].revision, *(METHODS[method].revision for method in methods)]
        for kind in ("timing", "memory"):
            revision = [timing.REVISION, *revisions] if kind == "timing" else revisions
            known = board.journal.measures.get((kind, task), {})
            if known.get("methods") == list(methods) and known.get("revision") == revision:
                continue
            console.print(f"{kind}: {task}")
            if kind == "timing":
                options = {"block": 3, "blocks": 3, "repeats": 1} if smoke else {}
                values: dict[str, Any] = timing.step_times(task, methods, board.reference, **options)
            else:
                values = {"bytes": timing.memory(task, methods)}
            board.journal.measure(kind, task, {"methods": list(methods), "revision": revision, **values})


def main(
    tasks: Annotated[str, typer.Option(help="Names, separated by commas; default: all.")] = "",
    methods: Annotated[str, typer.Option(help="Names, separated by commas; default: all.")] = "",
    horizon: Annotated[int, typer.Option(help="1: N steps alone; 4: N and 4N; 0: nothing is trained.")] = LONG_HORIZON,
    journal: Annotated[Path, typer.Option(help="Runs that are known, and where new ones go.")] = Path(
        "runs/scoreboard/journal.jsonl"
    ),
    workers: Annotated[int, typer.Option(help="Processes that train, each on one thread; 0: this one.")] = 2,
    again: Annotated[str, typer.Option(help="Methods whose code has changed: their runs are forgotten first.")] = "",
    smoke: Annotated[bool, typer.Option("--smoke", help="Two tasks, two methods, a few steps.")] = False,
    only_report: Annotated[bool, typer.Option("--report", help="Make the page from the result file alone.")] = False,
) -> None:
    """Search, run, time, and write the result and its page."""
    torch.set_num_threads(1)
    console = Console(highlight=False)
    results, page, images = RESULTS / "scoreboard.json", ROOT / "docs" / "scoreboard.md", ROOT / "docs" / "images"
    if smoke or tasks or methods:
        folder = journal.parent
        results, page, images = folder / "scoreboard.json", folder / "scoreboard.md", folder / "images"
    if only_report:
        report.write(json.loads(results.read_text()), page, images)
        console.print(page)
        return
    scale = Scale(tasks=chosen(tasks, TASKS, "--tasks"), methods=chosen(methods, METHODS, "--methods"))
    if smoke:
        scale = Scale(tasks=SMOKE_TASKS, methods=SMOKE_METHODS, seeds=(101,), rates=1, extensions=0, steps=SMOKE_STEPS)
    known = Journal(journal)
    if again:
        known.forget(chosen(again, METHODS, "--again"))
    board = Board(scale, known, workers)
    horizons = [1, LONG_HORIZON] if horizon == LONG_HORIZON else [1]
    try:
        for each in horizons if horizon else []:
            board.run(each)
    finally:
        board.close()
    measure(board, console, smoke=smoke)
    data = report.collect(board, horizons)
    data["variants"] = report.VARIANTS
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(data, separators=(",", ":")) + "\n")
    report.write(data, page, images)
    console.print(report.summary(data), page, sep="\n")


if __name__ == "__main__":
    typer.run(main)
