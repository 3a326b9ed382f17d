"""Settle how `natgrad.NaturalMuon` treats heads, momentum and intervals, on tasks that the scoreboard does not contain.

``python -m benchmarks.open_questions --steps 300 --seeds 1`` trains every method at every learning rate on every task,
and prints for each its best learning rate and the median of the final validation loss there. Every run is a line of a
journal, so that a run that is cut off goes on where it was.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from time import process_time
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW

import natgrad
from benchmarks.common import RESULTS, conditions
from benchmarks.scoreboard.baselines import KLShampoo, LeanMuon, split
from benchmarks.scoreboard.methods import Stepper

CONTEXT, VOCABULARY = 64, 128


# --- Models -----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, *, bias: bool) -> None:
        """Draw the projections."""
        super().__init__()
        self.heads, self.packed = heads, nn.Linear(width, 3 * width, bias=bias)
        self.output = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, width] to the same shape."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.packed(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """A gated perceptron."""

    def __init__(self, width: int) -> None:
        """Draw the projections."""
        super().__init__()
        inner = 8 * width // 3 // 8 * 8
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, width] to the same shape."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Language(nn.Module):
    """A character model: LayerNorm, GELU and a tied head, or RMSNorm, SwiGLU and an untied one."""

    def __init__(self, width: int, layers: int, *, modern: bool) -> None:
        """Draw embeddings, layers and the head."""
        super().__init__()
        norm = nn.RMSNorm if modern else nn.LayerNorm
        self.table, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        for embedding in (self.table, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            perceptron = (
                SwiGLU(width)
                if modern
                else nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            )
            attention = Attention(width, 4, bias=not modern)
            self.layers.append(nn.ModuleList([norm(width), attention, norm(width), perceptron]))
        self.norm, self.head = norm(width), nn.Linear(width, VOCABULARY, bias=False)
        if not modern:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        """Map characters [B, T] to logits [B, T, VOCABULARY]."""
        y = self.table(x) + self.places.weight
        for first, attention, second, perceptron in self.layers:  # type: ignore[misc]
            y = y + attention(first(y))
            y = y + perceptron(second(y))
        return self.head(self.norm(y))


class Convolutions(nn.Module):
    """A convolutional network with batch normalisation, with a head for the kind and one for the place."""

    def __init__(self, width: int) -> None:
        """Draw three pairs of convolutions and both heads."""
        super().__init__()
        channels = (1, width, 2 * width, 4 * width)
        self.body = nn.Sequential()
        for before, after in pairwise(channels):
            self.body.append(nn.Conv2d(before, after, 3, padding=1, bias=False))
            self.body.append(nn.BatchNorm2d(after))
            self.body.append(nn.ReLU())
            self.body.append(nn.Conv2d(after, after, 3, padding=1, bias=False))
            self.body.append(nn.BatchNorm2d(after))
            self.body.append(nn.ReLU())
            self.body.append(nn.MaxPool2d(2))
        self.kind, self.place = nn.Linear(4 * width, len(SHAPES)), nn.Linear(16 * width, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map images [B, 1, 16, 16] to logits [B, kinds] and places [B, 2]."""
        y = self.body(x)
        return self.kind(y.mean((2, 3))), self.place(y.flatten(1))


def autoencoder(width: int) -> nn.Module:
    """Return a deep tanh autoencoder of images of 12 x 12 pixels."""
    sizes = (144, 4 * width, 2 * width, width, 6, width, 2 * width, 4 * width, 144)
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


# --- Data -------------------------------------------------------------------------------------------------------------

SHAPES = ("disc", "ring", "square", "frame", "cross", "saltire", "bar", "pole")


@cache
def characters() -> tuple[Tensor, Tensor]:
    """Return Python's documentation of its topics, split by topic: every eighth for validation."""
    split: tuple[list[str], list[str]] = ([], [])
    for index, name in enumerate(sorted(topics)):
        split[index % 8 == 7].append(topics[name])
    train, valid = (
        torch.tensor([min(ord(character), VOCABULARY - 1) for character in "\n".join(texts)]) for texts in split
    )
    return train, valid


def windows(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return characters and those that follow them, ``[count, CONTEXT]`` each."""
    starts = torch.randint(len(text) - CONTEXT - 1, (count, 1), generator=generator)
    rows = text[starts + torch.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, 1:]


def shapes(count: int, generator: torch.Generator) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return noisy images ``[count, 1, 16, 16]``, their kinds and the places of what they show ``[count, 2]``."""
    kinds = torch.randint(len(SHAPES), (count,), generator=generator)
    places = torch.rand(count, 2, generator=generator) * 6 + 5
    size = torch.rand(count, 1, 1, generator=generator) * 2 + 2.5
    angle = torch.rand(count, 1, 1, generator=generator) * 0.6 - 0.3
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    y, x = y - places[:, 0, None, None], x - places[:, 1, None, None]
    u, v = (x * angle.cos() + y * angle.sin()) / size, (y * angle.cos() - x * angle.sin()) / size
    radius, side = torch.hypot(u, v), torch.maximum(u.abs(), v.abs())
    drawn = torch.stack(
        [
            radius < 1,
            (radius < 1.1) & (radius > 0.6),
            side < 0.9,
            (side < 1) & (side > 0.55),
            (side < 1.1) & (torch.minimum(u.abs(), v.abs()) < 0.3),
            (side < 1.1) & ((u.abs() - v.abs()).abs() < 0.4),
            (u.abs() < 1.2) & (v.abs() < 0.4),
            (v.abs() < 1.2) & (u.abs() < 0.4),
        ]
    ).float()
    images = drawn.gather(0, kinds[None, :, None, None].expand(1, -1, 16, 16))[0]
    images = images + 0.7 * torch.randn(count, 16, 16, generator=generator)
    return images[:, None], (kinds, (places - 8) / 3)


def curves(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images of a smooth stroke ``[count, 144]``, as input and as target (after Hinton's curves)."""
    knots = torch.rand(count, 3, 2, generator=generator) * 11
    t = torch.linspace(0, 1, 24)[None, :, None]
    points = (1 - t) ** 2 * knots[:, :1] + 2 * t * (1 - t) * knots[:, 1:2] + t**2 * knots[:, 2:]
    grid = torch.cartesian_prod(torch.arange(12.0), torch.arange(12.0))
    images = torch.exp(-torch.cdist(points, grid.expand(count, -1, -1)).amin(1).square())
    return images, images


# --- Tasks ------------------------------------------------------------------------------------------------------------

Batch = tuple[Tensor, "Tensor | tuple[Tensor, Tensor]"]


@dataclass(frozen=True)
class Task:
    """A model, batches that never repeat, and a loss."""

    model: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator, bool], Batch]
    loss: Callable[..., Tensor]
    batch: int
    validation: int


def language_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def shapes_loss(outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(outputs[0], targets[0]) + functional.mse_loss(outputs[1], targets[1])


def curves_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(outputs, targets.clamp(max=1), reduction="none").sum(1).mean()


def language(width: int, layers: int, *, modern: bool) -> Task:
    return Task(
        lambda: Language(width, layers, modern=modern),
        lambda count, generator, valid: windows(characters()[valid], count, generator),
        language_loss,
        32,
        128,
    )


TASKS = {
    "tied": language(64, 2, modern=False),
    "untied": language(64, 2, modern=True),
    "wide": language(160, 3, modern=True),
    "shapes": Task(lambda: Convolutions(12), lambda n, generator, _: shapes(n, generator), shapes_loss, 64, 2048),
    "curves": Task(lambda: autoencoder(24), lambda n, generator, _: curves(n, generator), curves_loss, 256, 2048),
}


# --- Methods ----------------------------------------------------------------------------------------------------------


def muon(model: nn.Module, lr: float, momentum: float = 0.9) -> Stepper:
    """Return Muon in float32, with AdamW at the same learning rate for all parameters but hidden matrices."""
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    heads = {id(module.weight) for name, module in model.named_modules() if name in HEADS}
    chosen = [parameter for parameter in split(model)[0] if id(parameter) not in tied | heads]
    hidden = set(map(id, chosen))
    rest = [parameter for parameter in model.parameters() if id(parameter) not in hidden]
    adamw = AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0)
    return Stepper([LeanMuon(chosen, lr=lr, momentum=momentum), adamw], lr)


HEADS = ["head", "kind", "place", "14"]  # of the models above, for `NaturalMuon`'s patterns


def natural(**options: object) -> Callable[[nn.Module, float], Stepper]:
    """Return natural Muon with some options."""
    chosen = {"head": "spectral", "heads": HEADS, **options}
    return lambda model, lr: Stepper([natgrad.NaturalMuon(model, lr, **chosen)], lr)  # type: ignore[arg-type]


def averaged(decay: float) -> Callable[[nn.Module, float], Stepper]:
    """Return natural Muon with another decay of its running averages, put together from its parts."""

    def build(model: nn.Module, lr: float) -> Stepper:
        rule = natgrad.DoublingInterval(25)
        preconditioner = natgrad.Preconditioner(
            model,
            {**dict.fromkeys(HEADS), "*": natgrad.Spectral(factor_decay=decay)},
            damping=1e-2,
            kl_clip=None,
            refresh=natgrad.Refresh(factors=rule, inverses=rule),
        )
        matrices = {id(parameter): parameter for parameter in preconditioner.parameters()}
        rest = [parameter for parameter in model.parameters() if id(parameter) not in matrices]
        adamw = AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0)
        return Stepper([SGD(list(matrices.values()), lr=lr), adamw], lr, before=preconditioner.step)

    return build


def kl_shampoo(model: nn.Module, lr: float) -> Stepper:
    """Return KL-Shampoo for all matrices, with AdamW for the rest."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    adamw = AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0)
    return Stepper([KLShampoo(matrices, lr=lr, betas=(0.9, 0.95)), adamw], lr)


METHODS: dict[str, Callable[[nn.Module, float], Stepper]] = {
    "AdamW": lambda model, lr: Stepper([AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0)], lr),
    "Muon": muon,
    "Muon .95": lambda model, lr: muon(model, lr, 0.95),
    "polar": natural(head="spectral"),
    "quarter": natural(head=natgrad.Spectral(power=0.25, steps=0)),
    "half": natural(head=natgrad.Spectral(power=0.5, steps=0)),
    "adamw": natural(head="adamw"),
    "momentum .95": natural(head="adamw", momentum=0.95),
    "interval 10": natural(head="adamw", interval=10),
    "interval 100": natural(head="adamw", interval=100),
    "bfloat16": natural(head="adamw", dtype=torch.bfloat16),
    "power .125": natural(head="adamw", power=0.125),
    "damping .1": natural(head="adamw", damping=0.1),
    "decay .8": averaged(0.8),
    "decay .9": averaged(0.9),
    "decay .95": averaged(0.95),
    "KL-Shampoo": kl_shampoo,
    # Convolutions by half powers without a polar factor, for `shapes`.
    "half convolutions": natural(head=natgrad.Spectral(power=0.5, steps=0), heads=["body.*"], adamw=["kind", "place"]),
}
RATES = (0.005, 0.01, 0.02, 0.04, 0.08)


# --- Runs -------------------------------------------------------------------------------------------------------------


def train(
    task: Task, build: Callable[[nn.Module, float], Stepper], lr: float, steps: int, seed: int, *, rises: bool = True
) -> dict[str, float]:
    """Train once; return the final validation loss and the seconds of processor time that a step took.

    `rises`: whether the learning rate rises in the first twentieth of the steps, before it falls.
    """
    torch.manual_seed(seed)
    model, generator = task.model(), torch.Generator().manual_seed(seed + 1)
    stepper = build(model, lr)
    warmup = max(1, steps // 20) if rises else 0

    def factor(step: int) -> float:
        rise = (step + 1) / warmup if rises else 1.0
        return min(rise, 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / (steps - warmup))))

    began = process_time()
    for step in range(steps):
        inputs, targets = task.draw(task.batch, generator, False)
        model.zero_grad()
        loss = task.loss(model(inputs), targets)
        if not math.isfinite(loss.item()):
            return {"loss": math.inf, "seconds": math.nan}
        loss.backward()
        stepper.step(factor(step))
    seconds = (process_time() - began) / steps
    model.eval()
    inputs, targets = task.draw(task.validation, torch.Generator().manual_seed(0), True)
    with torch.no_grad():
        return {"loss": task.loss(model(inputs), targets).item(), "seconds": seconds}


def runs(tasks: list[str], methods: list[str], rates: list[float], seeds: int) -> Iterator[tuple[str, str, float, int]]:
    for seed in range(seeds):
        for task in tasks:
            for method in methods:
                for lr in rates:
                    yield task, method, lr, seed


def main(
    tasks: Annotated[str, typer.Option(help="Names, with commas.")] = ",".join(TASKS),
    methods: Annotated[str, typer.Option(help="Names, with commas.")] = ",".join(METHODS),
    rates: Annotated[str, typer.Option(help="Learning rates, with commas.")] = ",".join(map(str, RATES)),
    steps: Annotated[int, typer.Option(help="Of a run.")] = 300,
    seeds: Annotated[int, typer.Option(help="How many, from 0.")] = 1,
    journal: Annotated[Path, typer.Option(help="Where runs are noted.")] = RESULTS / "open_questions.jsonl",
) -> None:
    """Run what the journal lacks, and print the table of what was asked for."""
    torch.set_num_threads(1)
    wanted = list(runs(tasks.split(","), methods.split(","), [float(rate) for rate in rates.split(",")], seeds))
    known = {}
    if journal.exists():
        for line in journal.read_text().splitlines():
            row = json.loads(line)
            known[row["task"], row["method"], row["lr"], row["seed"], row["steps"]] = row
    for task, method, lr, seed in wanted:
        key = (task, method, lr, seed, steps)
        if key not in known:
            names = ("task", "method", "lr", "seed", "steps")
            found = train(TASKS[task], METHODS[method], lr, steps, seed)
            known[key] = dict(zip(names, key, strict=True)) | found
            with journal.open("a") as file:
                file.write(json.dumps(known[key]) + "\n")
    losses: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for task, method, lr, seed in wanted:
        losses[task, method][lr].append(known[task, method, lr, seed, steps]["loss"])
    table = Table("method", *tasks.split(","), title=f"{steps} steps, {seeds} seeds: best median loss (learning rate)")
    for method in methods.split(","):
        cells = []
        for task in tasks.split(","):
            best, lr = min((median(values), lr) for lr, values in losses[task, method].items())
            cells.append(f"{best:.4f} ({lr:g})")
        table.add_row(method, *cells)
    Console().print(table)
    Console().print(json.dumps(conditions()["machine"]))


if __name__ == "__main__":
    typer.run(main)
