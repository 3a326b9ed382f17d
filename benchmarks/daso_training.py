"""Loss against seconds over a slow link: DASO, with and without natural gradient, beside plain data parallelism.

    python -m benchmarks.daso_training --task glyphs --rate 200mbit [--seeds 3] [--epochs 5]

The ranks are two nodes of `two_nodes.sh` with one rank each (Linux, root). Every contender has the task's tuned
settings, of SGD or of natgrad, and the same seeds, batches, length and schedule; averaging changes none of them.
The autoencoder has batches of 128 in place of 512, and 60 epochs, for an epoch of three steps is shorter than a cycle;
SGD's learning rate there is the best of three (0.1, 0.3, 1), natgrad's settings the best of three that begin with the
tuned ones (learning rate 1 or 0.3, KL clip 3e-4 or 1e-3), on another seed, by the final loss. On digits SGD has a
learning rate of 0.05: at the tuned 0.243 DDP fails on one seed of three, and noise is all one sees. On glyphs all have
15 epochs, for at the tuned 5 SGD has hardly begun, and natgrad renews at (10, 50) in place of (2, 20), the only other
intervals that were tried.
Contenders take turns, seed by seed, in processes that stay. The target of a seed is what plain DDP's SGD ends with: the
mean training loss of its last 32 steps, which the others reach where the mean of 32 steps is no greater. Evaluations do
not count in the seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from benchmarks.common import conditions, save
from benchmarks.links import hand_back, on_two_nodes
from benchmarks.training import run
from natgrad.training import tuned
from natgrad.training.job import Job
from natgrad.training.result import Point

DDP = "DDP"
FIRST_SEED = 100
WINDOW = 32  # steps that a loss is averaged over
Hook = Callable[..., Any]


@dataclass(frozen=True)
class Contender:
    """What is put beside DDP.

    Attributes:
        tuned: Whose tuned settings it has.
        averaging: Fields of its job.
        hook: Of DDP.
    """

    tuned: str = "sgd"
    averaging: Mapping[str, Any] | None = None
    hook: Hook | None = None


def _daso(**options: Any) -> dict[str, Any]:
    return {"averaging": "daso", "averaging_options": options}


CONTENDERS = {
    DDP: Contender(),
    "DDP, fp16 hook": Contender(hook=fp16_compress_hook),
    "DASO(4, 1)": Contender(averaging=_daso(merge="paper")),
    "DASO(4, 1), delta": Contender(averaging=_daso(merge="delta")),
    "DASO(4, 1), delta, bf16": Contender(averaging=_daso(merge="delta", cycling_wire="bfloat16")),
    "DASO(8, 4)": Contender(averaging=_daso(merge="paper", batches_between=8, batches_to_wait=4)),
    "DDP + K-FAC": Contender(tuned="kfac"),
    "DASO(4, 1) + K-FAC": Contender(tuned="kfac", averaging=_daso(merge="paper")),
}


# What differs from a task's tuned settings, for all contenders, and by whose settings they have.
SHARED: dict[str, dict[str, Any]] = {"autoencoder": {"batch_size": 128, "epochs": 60}, "glyphs": {"epochs": 15}}
OWN: dict[tuple[str, str], dict[str, Any]] = {
    ("autoencoder", "sgd"): {"learning_rate": 0.3},
    ("digits", "sgd"): {"learning_rate": 0.05},
    ("glyphs", "kfac"): {"factors": 10, "inverses": 50},
}


def job(contender: Contender, task: str, seed: int, epochs: int | None, options: Mapping[str, Any]) -> Job:
    """Return a contender's job.

    Raises:
        typer.BadParameter: if the task has no tuned settings.
    """
    known = tuned.read(task)
    if known is None:
        raise typer.BadParameter(f"{task} has no tuned settings", param_hint="--task")
    settings = {
        "epochs": known.search["adamw"]["epochs"],
        **known.settings[contender.tuned],
        **SHARED.get(task, {}),
        **OWN.get((task, contender.tuned), {}),
        **({} if epochs is None else {"epochs": epochs}),
        **(contender.averaging or {}),
    }
    workers = dist.get_world_size() if dist.is_initialized() else 2
    return Job(
        task=task,
        task_options=options,
        seed=seed,
        schedule=known.search["adamw"]["schedule"],
        workers=workers,
        **settings,
    )


def measure(task: str, names: Sequence[str], seeds: int, epochs: int | None, width: int | None) -> dict[str, list[Run]]:
    """Train all contenders with all seeds; to be called on every rank."""
    options = {} if width is None else {"width": width}
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for name, own in runs.items():
            contender = CONTENDERS[name]
            result, curve = run(job(contender, task, seed, epochs, options), contender.hook)
            own.append(Run(last=result.points[-1], seconds=curve.seconds, losses=curve.losses))
            if dist.get_rank() == 0:
                last = own[-1].last
                print(f"{name}, seed {seed}: loss {last.loss:.4f}, {last.metric:.4f}, {last.seconds:.1f} s", flush=True)
    return runs


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training.

    Attributes:
        last: The evaluation at its end.
        seconds: Of training after each step.
        losses: Of each step.
    """

    last: Point
    seconds: list[float]
    losses: list[float]

    @property
    def smooth(self) -> list[float]:
        """The mean of each step's loss and those before it, as many as count; shorter by these."""
        sums = [0.0, *accumulate(self.losses)]
        return [(after - before) / WINDOW for before, after in zip(sums, sums[WINDOW:], strict=False)]

    def reaches(self, target: float) -> int | None:
        """Return the step, counted from 0, at which the smooth loss is no greater; None: it never is."""
        return next((step + WINDOW - 1 for step, loss in enumerate(self.smooth) if loss <= target), None)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A contender: medians over seeds, with the least and the greatest of final values.

    Attributes:
        name: Of the contender.
        loss: Of the last epoch.
        metric: At the end.
        milliseconds: A step.
        reached: How many seeds reached the target.
        steps: To the target, of those seeds (None: no seed).
        faster: How many times as fast as DDP to the target.
        sent_mb: What DASO sent between nodes, all ranks together (None: DDP, which does not say).
    """

    name: str
    loss: tuple[float, float, float]
    metric: tuple[float, float, float]
    milliseconds: float
    reached: int
    steps: float | None
    faster: float | None
    sent_mb: float | None


def rows(runs: Mapping[str, Sequence[Run]]) -> list[Row]:
    """Return a row for each contender; each seed is compared with the same seed of DDP."""
    found = []
    for name, own in runs.items():
        last = [run.last for run in own]
        crossed = []
        for one, reference in zip(own, runs[DDP], strict=True):
            step = one.reaches(reference.smooth[-1])
            if step is not None:
                crossed.append((step + 1, reference.seconds[-1] / one.seconds[step]))
        sent = [point.averaging.get("bytes/between") for point in last]
        found.append(
            Row(
                name=name,
                loss=_spread([point.loss for point in last]),
                metric=_spread([point.metric for point in last]),
                milliseconds=median(1e3 * point.seconds / point.step for point in last),
                reached=len(crossed),
                steps=median(steps for steps, _ in crossed) if crossed else None,
                faster=median(faster for _, faster in crossed) if crossed else None,
                sent_mb=None if None in sent else median(float(each) for each in sent if each is not None) / 1e6,
            )
        )
    return found


def _spread(values: list[float]) -> tuple[float, float, float]:
    return median(values), min(values), max(values)


def table(found: Sequence[Row], title: str) -> Table:
    """Return the table of all rows."""
    columns = (
        "contender",
        "final loss",
        "final metric",
        "ms a step",
        "seeds at\ntarget",
        "after steps",
        "times as fast",
    )
    shown = Table(*columns, "MB between\nnodes", title=title)
    for row in found:
        final = (f"{middle:.4f} ({low:.4f} to {high:.4f})" for middle, low, high in (row.loss, row.metric))
        numbers = zip((row.steps, row.faster, row.sent_mb), (".0f", ".2f", ".0f"), strict=True)
        shown.add_row(
            *(row.name, *final, f"{row.milliseconds:.0f}", str(row.reached)),
            *("–" if number is None else format(number, style) for number, style in numbers),
        )
    return shown


def main(
    task: Annotated[str, typer.Option(help="An embedded task with tuned settings.")] = "glyphs",
    rate: Annotated[str, typer.Option(help="Of the link between the nodes, as tc writes it.")] = "200mbit",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each.")] = 3,
    epochs: Annotated[int | None, typer.Option(help="Default: those of the tuned settings.")] = None,
    width: Annotated[int | None, typer.Option(help="Of the model, where the task has that option.")] = None,
    contender: Annotated[list[str] | None, typer.Option(help="Repeatable; all unless given. DDP always is.")] = None,
    into: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train, print the table, and write benchmarks/results/daso_training_<task>_<rate>.json."""
    names = [name for name in CONTENDERS if name == DDP or not contender or name in contender]
    if into is not None:
        hand_back(partial(measure, task, names, seeds, epochs, width), into)
        return
    options = ["--task", task, "--seeds", str(seeds)]
    options += [] if epochs is None else ["--epochs", str(epochs)]
    options += [] if width is None else ["--width", str(width)]
    for name in contender or ():
        options += ["--contender", name]
    measured = on_two_nodes("benchmarks.daso_training", options, rate=rate, per_node=1)
    found = rows(measured)
    title = f"{task}{'' if width is None else f', width {width}'}, 2 nodes of 1, {rate}, {seeds} seeds"
    Console(width=160).print(table(found, title))
    torch.set_num_threads(1)
    settings = {"title": title, "rate": rate, "seeds": seeds, "first_seed": FIRST_SEED}
    curves = {
        name: [{"seconds": one.seconds[WINDOW - 1 :: WINDOW], "loss": one.smooth[::WINDOW]} for one in own]
        for name, own in measured.items()
    }
    named = f"daso_training_{task}_{rate}" if width is None else f"daso_training_{task}{width}_{rate}"
    typer.echo(save(named, conditions() | settings | {"rows": [asdict(row) for row in found], "curves": curves}))


if __name__ == "__main__":
    typer.run(main)
