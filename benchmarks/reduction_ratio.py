"""How well the local quadratic model foretells what steps do to the loss: the reduction ratio over a training.

    python -m benchmarks.reduction_ratio [--task autoencoder] [--epochs 60] [--start 0.1]

It trains with `natgrad.damping.LevenbergMarquardt` in the natgrad contender's settings without a KL clip, at a constant
learning rate, and notes at each comparison the step, γ, the ratio, and the loss of the mini-batch before.
"""

from __future__ import annotations

from math import isnan
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.data import DataLoader

import natgrad
from benchmarks.common import conditions, save
from natgrad import tasks
from natgrad.damping import LevenbergMarquardt

_WINDOWS = 8

Row = dict[str, float | None]


def main(
    task: Annotated[str, typer.Option(help="An embedded task.")] = "autoencoder",
    epochs: Annotated[int, typer.Option(help="Passes over the training set.")] = 60,
    start: Annotated[float, typer.Option(help="γ at the start.")] = 0.1,
    interval: Annotated[int, typer.Option(help="Steps from one comparison to the next.")] = 5,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.1,
    momentum: Annotated[float, typer.Option(help="Of SGD.")] = 0.9,
    seed: Annotated[int, typer.Option(help="Of the run.")] = 0,
) -> None:
    """Train, and show how the ratio and γ go."""
    rows = train(tasks.get(task), epochs, LevenbergMarquardt(start, interval=interval), lr, momentum, seed)
    Console().print(table(rows, task))
    options = {"epochs": epochs, "start": start, "interval": interval, "lr": lr, "momentum": momentum, "seed": seed}
    print(save(f"reduction_ratio_{task}", {"task": task, **options, "rows": rows, **conditions()}))


def train(task: tasks.Task, epochs: int, rule: LevenbergMarquardt, lr: float, momentum: float, seed: int) -> list[Row]:
    """Return what each comparison has shown."""
    torch.manual_seed(seed)
    model, rows, step = task.model(), list[Row](), 0
    loader = DataLoader(task.datasets()[0], task.batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    preconditioner = natgrad.Preconditioner(
        model,
        natgrad.KFAC(form="inverse", fisher="sampled", likelihood=task.likelihood),
        optimizer=optimizer,
        damping=rule,
        kl_clip=None,
        reduction=task.reduction,
        refresh=natgrad.Refresh(factors=2, inverses=20),
    )
    for _ in track(range(epochs), task.name, transient=True):
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = task.loss(outputs, targets)
            preconditioner.backward(loss, outputs)
            preconditioner.step(lambda x=inputs, y=targets: task.loss(model(x), y))
            optimizer.step()
            if step % rule.interval == 0:
                seen = preconditioner.metrics()
                ratio = float(seen["reduction_ratio"])
                gamma = float(seen["damping"])
                rows.append(
                    {"step": step, "gamma": gamma, "ratio": None if isnan(ratio) else ratio, "loss": loss.item()}
                )
            step += 1
    return rows


def table(rows: list[Row], task: str) -> Table:
    """Return medians over equal parts of the run."""
    made = Table(title=f"{task}: the reduction ratio, medians")
    for column in ("steps", "loss", "γ", "ratio", "least", "greatest"):
        made.add_column(column, justify="right")
    size = max(1, -(-len(rows) // _WINDOWS))
    for part in (rows[first : first + size] for first in range(0, len(rows), size)):
        ratios = [row["ratio"] for row in part if row["ratio"] is not None]
        values = [f"{median(row[name] or 0.0 for row in part):.3g}" for name in ("loss", "gamma")]
        spread = [f"{of(ratios):.3f}" for of in (median, min, max)] if ratios else [""] * 3
        made.add_row(f"{part[0]['step']} to {part[-1]['step']}", *values, *spread)
    return made


if __name__ == "__main__":
    typer.run(main)
