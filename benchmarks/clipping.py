"""Where to clip gradients: before preconditioning, as trainers do, after it (`clip_norm=`), or not at all.

``python -m benchmarks.clipping`` trains three small tasks off the scoreboard as a trainer's defaults do: the learning
rate falls linearly from the first step on, and gradients are clipped to the norm 1. It prints the final validation
loss, the median over seeds at the best learning rate.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn.utils import clip_grad_norm_

import natgrad
from benchmarks.common import RESULTS, conditions
from benchmarks.kfac_defaults import SIX

TASKS = ("untied", "residual", "curves")
RATES = {"natural-muon": (0.01, 0.02, 0.04), "adamw+kfac": (0.002, 0.004, 0.008)}
ORDERS = ("none", "before", "after")


def train(name: str, method: str, order: str, lr: float, steps: int, seed: int) -> float:
    """Train once; return the final validation loss."""
    task = SIX[name]
    torch.manual_seed(seed)
    model, generator = task.model(), torch.Generator().manual_seed(seed + 1)
    options = {"betas": (0.9, 0.95)} if method == "adamw+kfac" else {}
    clip_norm = 1.0 if order == "after" else None
    optimizer = natgrad.create_optimizer(model, method, lr=lr, clip_norm=clip_norm, **options)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        inputs, targets = task.draw(task.batch, generator, False)
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        if not math.isfinite(loss.item()):
            return math.inf
        loss.backward()
        if order == "before":
            clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    inputs, targets = task.draw(task.validation, torch.Generator().manual_seed(0), True)
    with torch.no_grad():
        found = task.loss(model(inputs), targets).item()
    return found if math.isfinite(found) else math.inf


def main(
    steps: Annotated[int, typer.Option(help="Of a run.")] = 200,
    seeds: Annotated[int, typer.Option(help="How many, from 0.")] = 3,
    journal: Annotated[Path, typer.Option(help="Where runs are noted.")] = RESULTS / "clipping.jsonl",
) -> None:
    """Run what the journal lacks, and print the table."""
    torch.set_num_threads(1)
    known: dict[str, float] = {}
    if journal.exists():
        known = dict(json.loads(line) for line in journal.read_text().splitlines())
    table = Table("method", "clipped", *TASKS, title=f"final loss after {steps} steps (learning rate)")
    for (method, rates), order in itertools.product(RATES.items(), ORDERS):
        if method == "natural-muon" and order == "after":
            continue  # its update has a size of its own: clip_norm= clips before it
        cells = []
        for name in TASKS:
            losses = {}
            for lr in rates:
                found = []
                for seed in range(seeds):
                    key = json.dumps([name, method, order, lr, steps, seed])
                    if key not in known:
                        known[key] = train(name, method, order, lr, steps, seed)
                        with journal.open("a") as file:
                            file.write(json.dumps([key, known[key]]) + "\n")
                    found.append(known[key])
                losses[lr] = median(found)
            best = min(losses, key=lambda lr: losses[lr])
            cells.append(f"{losses[best]:.4g} ({best:g})")
        table.add_row(method, order, *cells)
    Console().print(table)
    Console().print(json.dumps(conditions()["machine"]))


if __name__ == "__main__":
    typer.run(main)
