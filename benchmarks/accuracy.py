"""What placements that train alike, and one that does not (dp), reach on an embedded task.

    python -m benchmarks.accuracy [--task glyphs] [--placement comm-opt --placement dp] [--seeds 3] [--workers 2]

Each run trains with the task's tuned settings; a row holds the median and the spread over seeds of the last evaluation.
dp builds a layer's factors of one rank's samples alone: it is another method, and has to earn its accuracy.
"""

from __future__ import annotations

from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import conditions, save
from natgrad.training import tuned
from natgrad.training.job import Job
from natgrad.training.result import Point
from natgrad.training.run import Output, train


def main(
    task: Annotated[str, typer.Option(help="An embedded task with tuned settings.")] = "glyphs",
    placement: Annotated[list[str] | None, typer.Option(help="Repeatable.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each, with seeds 100, 101, ...")] = 3,
    workers: Annotated[int, typer.Option(help="Ranks.")] = 2,
) -> None:
    """Train a task under several placements, and compare what they reach."""
    known = tuned.read(task)
    if known is None:
        raise typer.BadParameter(f"{task} has no tuned settings", param_hint="--task")
    ends: dict[str, list[Point]] = {name: [] for name in placement or ("comm-opt", "dp")}
    for seed in range(100, 100 + seeds):  # one placement after the other, so that the machine's moods hit all alike
        for name, points in ends.items():
            terms = {name: known.search["kfac"][name] for name in ("schedule", "epochs")}
            job = Job(task=task, placement=name, workers=workers, seed=seed, **terms, **known.settings["kfac"])
            points.append(train(job, Output(), own_process=True).points[-1])
            print(f"{name}, seed {seed}: loss {points[-1].loss:.4f}, metric {points[-1].metric:.4f}", flush=True)
    table = Table(title=f"{task}, {workers} ranks, {seeds} seeds: median (least to greatest)")
    for column in ("placement", "loss", "metric"):
        table.add_column(column, justify="left" if column == "placement" else "right")
    for name, points in ends.items():
        table.add_row(name, _spread([one.loss for one in points]), _spread([one.metric for one in points]))
    Console().print(table)
    rows = {
        name: [{"loss": one.loss, "metric": one.metric, "steps": one.step} for one in points]
        for name, points in ends.items()
    }
    print(save(f"accuracy_{task}", {"task": task, "workers": workers, "ends": rows, **conditions()}))


def _spread(values: list[float]) -> str:
    return f"{median(values):.4f} ({min(values):.4f} to {max(values):.4f})"


if __name__ == "__main__":
    typer.run(main)
