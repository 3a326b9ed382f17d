"""How near each curvature's own damping comes to the best of a grid, on four of the embedded tasks.

    python -m benchmarks.default_damping [--curvature hylo] [--task digits] [--schedule cosine] [--damping 1]

All else is the same for all dampings: SGD with momentum 0.9, learning
rate 0.1 unless given, constant unless --schedule, the default KL clip, the true labels. A cell holds the mean training
loss of the last epoch, the median over the seeds; "over best" is that of the curvature's own damping over the least of
the row, of those that were tried. Trainings that the result file holds already are not repeated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, conditions, save
from natgrad.training import curvatures
from natgrad.training.job import Job
from natgrad.training.run import Output, train

NAME = "default_damping"
DAMPINGS = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
EPOCHS = {"digits": 8, "tabular": 12, "text": 3, "poisson": 15}
"""Short trainings: at their end no loss is so near to 0 that it differs by decades from seed to seed."""

SMALLER: dict[str, dict[str, Any]] = {
    "text": {"task_options": {"sequences": 512, "context": 16, "width": 32}, "batch_size": 16}
}
"""Tasks that are made smaller, for SNGD has a row for each position of a batch."""

SGD = "sgd alone"
OTHERS: dict[str, dict[str, Any]] = {
    SGD: {"curvature": "none"},
    "sngd": {},
    "hylo": {},
    "kfac": {},
    "rank-one": {"inverses": 1},
    "ekfac": {},
}
"""What the settings of a curvature differ in from those of all."""


def main(
    curvature: Annotated[list[str] | None, typer.Option(help="Repeatable; default: all.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Repeatable; default: all four.")] = None,
    seeds: Annotated[int, typer.Option(help="Trainings of each, with seeds 0, 1, ...")] = 3,
    learning_rate: Annotated[list[float] | None, typer.Option(help="Repeatable; default: 0.1.")] = None,
    schedule: Annotated[str, typer.Option(help="Of the learning rate: constant or cosine.")] = "constant",
    damping: Annotated[list[float] | None, typer.Option(help="Beside its own; repeatable; default: the grid.")] = None,
) -> None:
    """Train with each damping, and compare the final losses."""
    torch.set_num_threads(1)
    path = RESULTS / f"{NAME}.json"
    for rate in learning_rate or [0.1]:
        for name in curvature or list(OTHERS):
            for own in task or list(EPOCHS):
                key = f"{name}, {own}, {schedule} {rate:g}"
                losses = _known().get(key, {})
                _fill(losses, name, own, damping or DAMPINGS, {"learning_rate": rate, "schedule": schedule}, seeds)
                save(NAME, {"losses": {**_known(), key: losses}, "epochs": EPOCHS, **conditions("cpu")})
    Console(width=140).print(table(_known()))
    print(path)


def _known() -> dict[str, dict[str, list[float | None]]]:
    """Return the losses in the result file, by seed, of each damping, of each curvature, task and learning rate."""
    path = RESULTS / f"{NAME}.json"
    return json.loads(path.read_text())["losses"] if path.exists() else {}


def _fill(
    losses: dict[str, list[float | None]],
    name: str,
    task: str,
    grid: Sequence[float],
    settings: dict[str, Any],
    seeds: int,
) -> None:
    """Add the losses that are missing, by damping; None for a training that has diverged."""
    own = default_of(name)
    dampings = [math.nan] if name == SGD else sorted({*grid, own})
    for damping in dampings:
        found = losses.setdefault(f"{damping:g}", [])
        for seed in range(len(found), seeds):
            found.append(final_loss(name, task, damping, settings, seed))
            print(f"{name}, {task}, {settings}, damping {damping:g}, seed {seed}: {found[-1]}", flush=True)


def final_loss(name: str, task: str, damping: float, settings: dict[str, Any], seed: int) -> float | None:
    """Return the mean training loss of the last epoch to three digits; None where it is no number."""
    settings = {"curvature": name, "options": {"momentum": 0.9}, **OTHERS[name], **settings}
    if settings["curvature"] not in ("none", "rank-one"):
        settings["fisher"] = "empirical"
    if name != SGD:
        settings["damping"] = damping
    job = Job(
        task=task,
        seed=seed,
        epochs=EPOCHS[task],
        optimizer="sgd",
        device="cpu",
        **SMALLER.get(task, {}),
        **settings,
    )
    result = train(job, Output())
    return float(f"{result.points[-1].loss:.3g}") if result.status == "finished" else None


def default_of(name: str) -> float:
    """Return the damping that a curvature has of its own; not a number where there is none."""
    if name == SGD:
        return math.nan
    fisher = None if name == "rank-one" else "empirical"
    return curvatures.build(name, {}, fisher=fisher, likelihood="categorical").default_damping


def table(known: dict[str, dict[str, Any]]) -> Table:
    """Return the medians over the seeds as a table."""
    made = Table(title="Mean training loss of the last epoch")
    for column in ("curvature, task, learning rate", *(f"{each:g}" for each in DAMPINGS), "own", "over best"):
        made.add_column(column, justify="right" if made.columns else "left")
    for row, losses in known.items():
        middle = {
            damping: median(math.inf if each is None else each for each in own) for damping, own in losses.items()
        }
        name = row.split(",")[0]
        if name == SGD:
            made.add_row(row, *[""] * len(DAMPINGS), f"{middle['nan']:.3g}", "")
            continue
        own = default_of(name)
        cells = [f"{middle[f'{each:g}']:.3g}" if f"{each:g}" in middle else "" for each in DAMPINGS]
        over = middle[f"{own:g}"] / min(middle.values())
        made.add_row(row, *cells, f"{own:g}", f"{over:.2f}")
    return made


if __name__ == "__main__":
    typer.run(main)
