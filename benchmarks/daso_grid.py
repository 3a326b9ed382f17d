"""What B, S and the merge cost: the grid of Coquelin et al. 2021, table 2, on an embedded task, without a link.

    python -m benchmarks.daso_grid [--task digits] [--nodes 4] [--seeds 3]

As there, B and S stay as they are for the whole run: no warm-up, no cool-down, no plateau rule. Nodes are emulated, of
one rank each. An epoch's last step makes them equal and forgets the messages under way, so that an epoch is to be much
longer than B + S: here it is a number of steps, however many passes over the training set these are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import cos, pi
from statistics import median
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import natgrad
from benchmarks.common import conditions, launch, save
from natgrad import tasks
from natgrad.averaging.merge import Merge

PAIRS = ((1, 0), (4, 0), (4, 1), (4, 4), (8, 0), (8, 4), (8, 8), (16, 8), (16, 16), (32, 0), (32, 16), (32, 32))
CELLS: tuple[tuple[int, int, Merge], ...] = tuple(
    (between, wait, merge) for between, wait in PAIRS for merge in (("paper", "delta") if wait else ("delta",))
)
"""With S = 0 both merges are the plain mean."""
FIRST_SEED = 100
SHORTEST = 10
"""How many times as long as B + S an epoch has to be."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all runs share."""

    task: str
    nodes: int
    seeds: int
    epochs: int
    steps_per_epoch: int
    batch_size: int
    learning_rate: float


@dataclass(frozen=True, kw_only=True)
class End:
    """How a run ended.

    Attributes:
        loss: Of the model that all nodes have at the end, on the whole training set.
        running_loss: Mean over the steps of the last epoch and the nodes, each node's model on its own batches.
        metric: Of the model at the end, on the test set.
        merges: How many messages were merged in the whole run.
        sent_mb: Between nodes, all ranks together.
    """

    loss: float
    running_loss: float
    metric: float
    merges: int
    sent_mb: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """A cell of the grid: final values of each seed, as `End` has them.

    Attributes:
        between: B.
        wait: S.
        merge: The rule; with S = 0 both are the same.
    """

    between: int
    wait: int
    merge: str
    loss: list[float]
    running_loss: list[float]
    metric: list[float]
    merges: list[int]
    sent_mb: float


def indices(samples: int, batch: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Yield the samples of each step's batch, over all ranks: pass after pass, each in an order drawn anew."""
    order, left = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        while len(left) < batch:
            left = torch.cat([left, torch.randperm(samples, generator=order)])
        yield left[:batch]
        left = left[batch:]


def train(setting: Setting, between: int, wait: int, merge: Merge, seed: int) -> End:
    """Train one cell with one seed; to be called on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    task = tasks.get(setting.task)
    training, test = task.datasets()
    torch.manual_seed(seed)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.learning_rate, momentum=0.9)
    steps = setting.epochs * setting.steps_per_epoch
    scheduler = LambdaLR(optimizer, lambda step: 0.5 * (1 + cos(pi * step / steps)))
    daso = natgrad.DASO(
        model,
        optimizer,
        nodes=natgrad.Nodes((1,) * ranks),
        epochs=setting.epochs,
        steps_per_epoch=setting.steps_per_epoch,
        batches_between=between,
        batches_to_wait=wait,
        warmup_epochs=0,
        cooldown_epochs=0,
        merge=merge,
        patience=10**9,
    )
    running = torch.zeros(())
    for step, batch in enumerate(indices(len(training), setting.batch_size, steps, seed)):
        inputs, targets = training[batch[rank::ranks]]
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        daso.step(loss)
        scheduler.step()
        if step >= steps - setting.steps_per_epoch:
            running += loss.detach() / setting.steps_per_epoch
    sent = torch.tensor(float(daso.traffic()["between"]))
    for each in (running, sent):
        dist.all_reduce(each)
    merges = int(daso.metrics()["merges"])
    daso.detach()
    model.eval()
    with torch.no_grad():
        inputs, targets = training.tensors
        final = float(task.loss(model(inputs), targets))
        evaluator = task.evaluator()
        own = range(rank, len(test), ranks)
        inputs, targets = test[list(own)]
        evaluator.update(model(inputs), targets)
        metric = float(evaluator.compute())
    return End(loss=final, running_loss=float(running) / ranks, metric=metric, merges=merges, sent_mb=float(sent) / 1e6)


def measure(setting: Setting) -> list[Row]:
    """Train every cell with every seed; to be called on every rank."""
    ends: dict[tuple[int, int, Merge], list[End]] = {cell: [] for cell in CELLS}
    for seed in range(FIRST_SEED, FIRST_SEED + setting.seeds):
        for (between, wait, merge), own in ends.items():
            last = train(setting, between, wait, merge, seed)
            own.append(last)
            if dist.get_rank() == 0:
                told = f"{last.loss:.5f}, running {last.running_loss:.5f}, {last.metric:.4f}, {last.merges} merges"
                print(f"B {between}, S {wait}, {merge}, seed {seed}: {told}", flush=True)
    return [
        Row(
            between=between,
            wait=wait,
            merge=merge if wait else "either",
            loss=[end.loss for end in own],
            running_loss=[end.running_loss for end in own],
            metric=[end.metric for end in own],
            merges=[end.merges for end in own],
            sent_mb=own[0].sent_mb,
        )
        for (between, wait, merge), own in ends.items()
    ]


def table(found: list[Row], title: str) -> Table:
    """Return the table of all cells."""
    shown = Table("B", "S", "merge", "final loss", "running loss", "final metric", "merges", "MB", title=title)
    for row in found:
        spreads = (f"{median(v):.4f} ({min(v):.4f} to {max(v):.4f})" for v in (row.loss, row.running_loss, row.metric))
        shown.add_row(
            str(row.between), str(row.wait), row.merge, *spreads, str(round(median(row.merges))), f"{row.sent_mb:.1f}"
        )
    return shown


def main(
    task: Annotated[str, typer.Option(help="An embedded task.")] = "digits",
    nodes: Annotated[int, typer.Option(min=2, help="Emulated, of one rank each.")] = 4,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each cell.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Of each run.")] = 2,
    steps_per_epoch: Annotated[int, typer.Option(min=1, help="Ten times B + S at least.")] = 640,
    batch_size: Annotated[int, typer.Option(min=1, help="Over all ranks.")] = 32,
    lr: Annotated[float, typer.Option(help="Of SGD with momentum 0.9, falling to 0 as a cosine.")] = 0.05,
) -> None:
    """Train, print the table, and write benchmarks/results/daso_grid_<task>_<nodes>.json."""
    shortest = SHORTEST * max(between + wait for between, wait in PAIRS)
    if steps_per_epoch < shortest:
        raise typer.BadParameter(f"{steps_per_epoch}: at least {shortest}", param_hint="--steps-per-epoch")
    setting = Setting(
        task=task,
        nodes=nodes,
        seeds=seeds,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        batch_size=batch_size,
        learning_rate=lr,
    )
    found = launch(nodes, measure, setting)
    Console(width=140).print(table(found, f"{task}, {nodes} emulated nodes, {seeds} seeds"))
    torch.set_num_threads(1)
    typer.echo(save(f"daso_grid_{task}_{nodes}", conditions() | asdict(setting) | {"rows": [*map(asdict, found)]}))


if __name__ == "__main__":
    typer.run(main)
