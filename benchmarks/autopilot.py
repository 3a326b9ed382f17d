"""What `natgrad.Autopilot` reaches on the embedded tasks, beside each task's tuned damping and others a decade apart.

    python -m benchmarks.autopilot [--task digits --task tabular] [--seeds 3] [--fixed 0.01]

All else is the task's tuned setting, which goes with the tuned damping. A row holds the final training loss of each
seed, and their median over that of the tuned damping: at most 1.1 is what was aimed at. A task's earlier result is kept
where that task is left out.
"""

from __future__ import annotations

import json
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, conditions, save
from natgrad import tasks
from natgrad.training import tuned
from natgrad.training.job import Job
from natgrad.training.run import Output, train


def main(
    task: Annotated[list[str] | None, typer.Option(help="Repeatable; default: all with tuned settings.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each, with seeds 200, 201, ...")] = 3,
    fixed: Annotated[list[float] | None, typer.Option(help="Further dampings; repeatable.")] = None,
) -> None:
    """Train each task with the tuned damping and with none given, and compare the final losses."""
    path = RESULTS / "autopilot.json"
    known: dict[str, Any] = json.loads(path.read_text())["tasks"] if path.exists() else {}
    for name in task or tasks.names():
        found = compare(name, seeds, fixed or [])
        if found:
            known[name] = found
            path = save("autopilot", {"tasks": known, **conditions()})
    Console().print(table(known))
    print(path)


def compare(task: str, seeds: int, fixed: list[float]) -> dict[str, Any]:
    """Return the runs of a task, by damping; none where it has no tuned settings."""
    known = tuned.read(task)
    if known is None:
        return {}
    settings, terms = known.settings["natgrad"], known.target_terms
    dampings = {"tuned": settings["damping"], "auto": "auto", **{f"{value:g}": value for value in fixed}}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in dampings}
    for seed in range(200, 200 + seeds):  # one after the other, so that the machine's moods hit all alike
        for name, damping in dampings.items():
            length = {"schedule": terms["schedule"], "epochs": terms["epochs"]}
            result = train(Job(task=task, seed=seed, **length, **{**settings, "damping": damping}), Output())
            last = result.points[-1] if result.points else None
            own = {"seed": seed, "status": result.status, "damping": result.preconditioner["damping"]}
            own |= {"loss": last.loss, "metric": last.metric} if last else {}
            runs[name].append(own)
            print(f"{task}, {name}, seed {seed}: {own}", flush=True)
    return {"settings": settings, "runs": runs}


def table(known: dict[str, Any]) -> Table:
    """Return the final losses as a table."""
    made = Table(title="Final training loss")
    for column in ("task", "damping", "γ", "loss of each seed", "median", "over tuned", "metric"):
        made.add_column(column, justify="left" if column in ("task", "damping") else "right")
    for task, own in known.items():
        losses = {name: [run.get("loss", float("inf")) for run in runs] for name, runs in own["runs"].items()}
        for name, values in losses.items():
            gammas = " ".join(f"{run['damping']:.2g}" for run in own["runs"][name])
            metric = median([run.get("metric", float("nan")) for run in own["runs"][name]])
            share = median(values) / median(losses["tuned"])
            each = " ".join(f"{value:.3g}" for value in values)
            made.add_row(task, name, gammas, each, f"{median(values):.3g}", f"{share:.2f}", f"{metric:.4g}")
    return made


if __name__ == "__main__":
    typer.run(main)
