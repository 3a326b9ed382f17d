"""What B and S cost in accuracy: the grid of Coquelin et al. 2021, table 2, on an embedded task, without a link.

    python -m benchmarks.daso_grid [--task digits] [--nodes 4] [--seeds 3]

As there, B and S stay as they are for the whole run: no warm-up, no cool-down, no plateau rule. Nodes are emulated, of
one rank each; each epoch's end makes them equal, as evaluation needs it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import conditions, launch, save
from benchmarks.training import run
from natgrad.training.job import Job
from natgrad.training.result import Point

PAIRS = ((1, 0), (4, 0), (4, 1), (4, 4), (8, 0), (8, 4), (8, 8), (16, 8), (16, 16), (32, 0), (32, 16), (32, 32))
FIRST_SEED = 100


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all runs share."""

    task: str
    nodes: int
    seeds: int
    epochs: int
    batch_size: int
    learning_rate: float
    merge: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """A pair: final values of each seed.

    Attributes:
        between: B.
        wait: S.
        loss: Mean training loss of the last epoch.
        metric: On the test set.
        sent_mb: Between nodes, all ranks together.
    """

    between: int
    wait: int
    loss: list[float]
    metric: list[float]
    sent_mb: float


def measure(setting: Setting) -> list[Row]:
    """Train every pair with every seed; to be called on every rank."""
    ends: dict[tuple[int, int], list[Point]] = {pair: [] for pair in PAIRS}
    for seed in range(FIRST_SEED, FIRST_SEED + setting.seeds):
        for (between, wait), points in ends.items():
            options = {"batches_between": between, "batches_to_wait": wait, "merge": setting.merge}
            job = Job(
                task=setting.task,
                optimizer="sgd",
                options={"momentum": 0.9},
                learning_rate=setting.learning_rate,
                schedule="cosine",
                epochs=setting.epochs,
                batch_size=setting.batch_size,
                workers=setting.nodes,
                nodes=setting.nodes,
                seed=seed,
                averaging="daso",
                averaging_options=options | {"warmup_epochs": 0, "cooldown_epochs": 0, "patience": 10**9},
            )
            last = run(job)[0].points[-1]
            points.append(last)
            if dist.get_rank() == 0:
                print(f"B {between}, S {wait}, seed {seed}: {last.loss:.4f}, {last.metric:.4f}", flush=True)
    return [
        Row(
            between=between,
            wait=wait,
            loss=[point.loss for point in points],
            metric=[point.metric for point in points],
            sent_mb=float(points[0].averaging["bytes/between"]) / 1e6,
        )
        for (between, wait), points in ends.items()
    ]


def table(found: list[Row], title: str) -> Table:
    """Return the table of all pairs."""
    shown = Table("B", "S", "final loss", "final metric", "MB between nodes", title=title)
    for row in found:
        spreads = (f"{median(v):.4f} ({min(v):.4f} to {max(v):.4f})" for v in (row.loss, row.metric))
        shown.add_row(str(row.between), str(row.wait), *spreads, f"{row.sent_mb:.1f}")
    return shown


def main(
    task: Annotated[str, typer.Option(help="An embedded task.")] = "digits",
    nodes: Annotated[int, typer.Option(min=2, help="Emulated, of one rank each.")] = 4,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each pair.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Of each run.")] = 8,
    batch_size: Annotated[int, typer.Option(min=1, help="Over all ranks.")] = 32,
    lr: Annotated[float, typer.Option(help="Of SGD with momentum 0.9.")] = 0.05,
    merge: Annotated[str, typer.Option(help="paper or delta.")] = "paper",
) -> None:
    """Train, print the table, and write benchmarks/results/daso_grid_<task>.json."""
    setting = Setting(
        task=task, nodes=nodes, seeds=seeds, epochs=epochs, batch_size=batch_size, learning_rate=lr, merge=merge
    )
    found = launch(nodes, measure, setting)
    title = f"{task}, {nodes} emulated nodes, {seeds} seeds, {merge} merge"
    Console(width=120).print(table(found, title))
    torch.set_num_threads(1)
    name = f"daso_grid_{task}" if merge == "paper" else f"daso_grid_{task}_{merge}"
    typer.echo(save(name, conditions() | asdict(setting) | {"rows": [asdict(row) for row in found]}))


if __name__ == "__main__":
    typer.run(main)
