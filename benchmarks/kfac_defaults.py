"""How near K-FAC's defaults come to its tuned settings, beside AdamW: six tasks of three kinds, none on the scoreboard.

``python -m benchmarks.kfac_defaults`` trains each setting of a grid on each task, and prints for each pair of damping
and KL clip the final validation loss over that of the best setting, each at its best learning rate. Every run is a line
of a journal, so that a run that is cut off goes on where it was.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

import natgrad
from benchmarks.common import RESULTS, conditions
from benchmarks.open_questions import SHAPES, TASKS, Task, shapes
from benchmarks.scoreboard.methods import Stepper


class Residual(nn.Module):
    """A residual network with group normalisation and strided convolutions."""

    def __init__(self, width: int) -> None:
        """Draw a stem, three blocks and a head."""
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList()
        for before, after in ((width, width), (width, 2 * width), (2 * width, 4 * width)):
            inner = nn.Sequential(
                nn.GroupNorm(4, before),
                nn.ReLU(),
                nn.Conv2d(before, after, 3, stride=after // before, padding=1),
                nn.GroupNorm(4, after),
                nn.ReLU(),
                nn.Conv2d(after, after, 3, padding=1),
            )
            self.blocks.append(nn.ModuleList([inner, nn.Conv2d(before, after, 1, stride=after // before)]))
        self.head = nn.Linear(4 * width, len(SHAPES))

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 1, 16, 16] to logits [B, kinds]."""
        y = self.stem(x)
        for inner, shortcut in self.blocks:  # type: ignore[misc]
            y = shortcut(y) + inner(y)
        return self.head(y.relu().mean((2, 3)))


def kinds(count: int, generator: torch.Generator, _: bool) -> tuple[Tensor, Tensor]:
    """Return images of shapes and their kinds."""
    images, (labels, _places) = shapes(count, generator)
    return images, labels


def perceptron(*sizes: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """Return a perceptron."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def lesson(count: int, generator: torch.Generator, _: bool) -> tuple[Tensor, Tensor]:
    """Return inputs of uneven sizes and what a fixed network, the teacher, makes of them."""
    inputs = torch.randn(count, 24, generator=generator) * torch.logspace(0, -1.5, 24)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        teacher = perceptron(24, 32, 32, 8)
        for layer in teacher[::2]:
            layer.weight.data *= 3
    with torch.no_grad():
        return inputs, teacher(inputs)


SIX: dict[str, Task] = {
    **{name: TASKS[name] for name in ("tied", "untied", "shapes", "curves")},
    "residual": Task(lambda: Residual(12), kinds, functional.cross_entropy, 64, 2048),
    "teacher": Task(lambda: perceptron(24, 96, 96, 96, 8), lesson, functional.mse_loss, 128, 4096),
}
TOKENS = ("tied", "untied")
DAMPINGS, CLIPS, RATES = (1e-3, 1e-2, 3e-2, 1e-1), (3e-4, 1e-3, 3e-3, None), (0.03, 0.1, 0.3)
Setting = tuple[str, float, float, float | None]  # method, learning rate, damping, KL clip


def build(name: str, model: nn.Module, setting: Setting) -> Stepper:
    """Return a method: AdamW, SGD, or before SGD K-FAC in a form ("inverse", "eigen") or "ekfac"; "kfac-adamw"."""
    method, rate, damping, clip = setting
    optimizer: Optimizer = SGD(model.parameters(), lr=rate, momentum=0.9)
    if method.endswith("adamw"):
        optimizer = AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0)
    if method in ("adamw", "sgd"):
        return Stepper([optimizer], rate)
    form: Any = "inverse" if method == "kfac-adamw" else method
    preconditioner = natgrad.Preconditioner(
        model,
        natgrad.EKFAC() if method == "ekfac" else natgrad.KFAC(form=form),
        optimizer=optimizer,
        damping=damping,
        kl_clip=clip,
        reduction="tokens" if name in TOKENS else "mean",
        refresh=natgrad.Refresh(factors=1, inverses=10),
    )
    return Stepper([optimizer], rate, before=preconditioner.step)


def train(name: str, setting: Setting, steps: int, seed: int) -> float:
    """Train once, with 5 % of warm-up and a cosine; return the final validation loss."""
    task = SIX[name]
    torch.manual_seed(seed)
    model, generator = task.model(), torch.Generator().manual_seed(seed + 1)
    stepper, warmup = build(name, model, setting), max(1, steps // 20)
    for step in range(steps):
        inputs, targets = task.draw(task.batch, generator, False)
        model.zero_grad()
        loss = task.loss(model(inputs), targets)
        if not math.isfinite(loss.item()):
            return math.inf
        loss.backward()
        cosine = 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / (steps - warmup)))
        try:
            stepper.step(min((step + 1) / warmup, cosine))
        except natgrad.CurvatureError:  # no finite gradients any more
            return math.inf
    model.eval()
    inputs, targets = task.draw(task.validation, torch.Generator().manual_seed(0), True)
    with torch.no_grad():
        found = task.loss(model(inputs), targets).item()
    return found if math.isfinite(found) else math.inf


def settings(forms: list[str], clips: list[float | None]) -> list[Setting]:
    """Return all settings."""
    found: list[Setting] = [("adamw", rate, 0.0, None) for rate in (0.001, 0.002, 0.004, 0.008, 0.016)]
    found += [("kfac-adamw", rate, 1e-2, None) for rate in (0.001, 0.002, 0.004, 0.008, 0.016)]
    found += [("sgd", rate, 0.0, None) for rate in (*RATES, 1.0)]
    grid = itertools.product(forms, RATES, DAMPINGS, clips)
    return found + [(form, rate, damping, clip) for form, rate, damping, clip in grid]


def main(
    tasks: Annotated[str, typer.Option(help="Names, with commas.")] = ",".join(SIX),
    forms: Annotated[str, typer.Option(help="Of K-FAC, with commas; or ekfac.")] = "inverse",
    clips: Annotated[str, typer.Option(help="KL clips, with commas.")] = ",".join(map(str, CLIPS)),
    steps: Annotated[int, typer.Option(help="Of a run.")] = 200,
    seeds: Annotated[int, typer.Option(help="How many, from 0.")] = 1,
    journal: Annotated[Path, typer.Option(help="Where runs are noted.")] = RESULTS / "kfac_defaults.jsonl",
) -> None:
    """Run what the journal lacks, and print the tables."""
    torch.set_num_threads(1)
    known: dict[str, float] = {}
    if journal.exists():
        known = dict(json.loads(line) for line in journal.read_text().splitlines())
    losses: dict[tuple[str, Setting], float] = {}
    bounds = [None if clip == "None" else float(clip) for clip in clips.split(",")]
    for name, setting in itertools.product(tasks.split(","), settings(forms.split(","), bounds)):
        found = []
        for seed in range(seeds):
            key = json.dumps([name, *setting, steps, seed])
            if key not in known:
                known[key] = train(name, setting, steps, seed)
                with journal.open("a") as file:
                    file.write(json.dumps([key, known[key]]) + "\n")
            found.append(known[key])
        losses[name, setting] = median(found)
    report(losses, tasks.split(","), bounds)


def report(losses: dict[tuple[str, Setting], float], tasks: list[str], clips: list[float | None]) -> None:
    """Print the best of each method, and how far each pair of damping and clip is from K-FAC's best."""
    console = Console()
    every = {setting for _, setting in losses}
    forms = sorted({setting[0] for setting in every} - {"adamw", "sgd", "kfac-adamw"})
    table = Table("method", *tasks, title="best final loss (learning rate, damping, KL clip)")
    for method in ("adamw", "kfac-adamw", "sgd", *forms):
        cells = []
        for name in tasks:
            best = min((s for s in every if s[0] == method), key=lambda s: losses[name, s])
            cells.append(f"{losses[name, best]:.4g} ({best[1]:g}, {best[2]:g}, {best[3]})")
        table.add_row(method, *cells)
    console.print(table)
    for form in forms:
        best_of = {name: min(losses[name, s] for s in every if s[0] == form) for name in tasks}
        table = Table("damping", "KL clip", "worst", *tasks, title=f"{form}: over the best, at the best learning rate")
        rows = []
        for damping, clip in itertools.product(DAMPINGS, clips):
            least = {name: min(losses[name, (form, rate, damping, clip)] for rate in RATES) for name in tasks}
            ratios = [least[name] / best_of[name] for name in tasks]
            rows.append((max(ratios), damping, clip, ratios))
        for worst, damping, clip, ratios in sorted(rows, key=lambda row: row[0]):
            table.add_row(f"{damping:g}", str(clip), f"{worst:.2f}", *(f"{ratio:.2f}" for ratio in ratios))
        console.print(table)
    console.print(json.dumps(conditions()["machine"]))


if __name__ == "__main__":
    typer.run(main)
