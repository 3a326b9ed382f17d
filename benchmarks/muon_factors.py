"""Which factors of small layers natural Muon should keep whole: eleven small tasks, none on the scoreboard.

``python -m benchmarks.muon_factors`` trains natural Muon with whole factors of sides of up to 64, 128 and 256 columns,
and of all sides, on each task, and prints how the final validation loss changes compared with diagonals and channels
however short a side is. Every run is a line of a journal, so that a run that is cut off goes on where it was; with
``--seeds 0`` nothing is trained, and the table shows what the journal has. Update products are in bfloat16 on
processors with instructions for it: losses differ on others.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import natgrad
from benchmarks import open_questions
from benchmarks.common import RESULTS, conditions
from benchmarks.kfac_defaults import kinds, perceptron
from benchmarks.open_questions import SHAPES, VOCABULARY, Task, characters, language_loss, windows

CONTEXT = 32
SIGNS = 12  # kinds of signs
FEATURES, CLASSES = 24, 12  # of the mixture


class Attention(nn.Module):
    """Causal self-attention with separate projections for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        """Draw the projections."""
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, width] to the same shape."""
        projections = (self.query, self.key, self.value)
        q, k, v = (projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for projection in projections)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Language(nn.Module):
    """A character model with separate projections, LayerNorm, GELU and an untied head."""

    def __init__(self, width: int, layers: int) -> None:
        """Draw embeddings, layers and the head."""
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        for embedding in (self.table, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            attention = Attention(width, 4)
            expanded = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            self.layers.append(nn.ModuleList([nn.LayerNorm(width), attention, nn.LayerNorm(width), expanded]))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    forward = open_questions.Language.forward


class Residual(nn.Module):
    """A residual network with batch normalisation and strided convolutions, for three channels."""

    def __init__(self, *widths: int) -> None:
        """Draw a stem, a block for every further width and a head."""
        super().__init__()
        self.stem = normalized(3, widths[0], 3, 2)
        self.first, self.second, self.shortcuts = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for before, after in itertools.pairwise(widths):
            self.first.append(normalized(before, after, 3, 2))
            self.second.append(normalized(after, after, 3, 1))
            self.shortcuts.append(normalized(before, after, 1, 2))
        self.head = nn.Linear(widths[-1], len(SHAPES))

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 3, 16, 16] to logits [B, kinds]."""
        y = self.stem(x).relu()
        for first, second, shortcut in zip(self.first, self.second, self.shortcuts, strict=True):
            y = (shortcut(y) + second(first(y).relu())).relu()
        return self.head(y.mean((2, 3)))


def normalized(before: int, after: int, kernel: int, stride: int) -> nn.Sequential:
    """Return a convolution and its batch normalisation."""
    convolution = nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after))


def plain(width: int, side: int, classes: int) -> nn.Sequential:
    """Return three convolutions with biases and without normalisation and a head, for images ``[B, 1, side, side]``."""
    layers: list[nn.Module] = []
    for before, after in ((1, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        if before > 1:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width * (side // 4) ** 2, classes))


def strided() -> nn.Sequential:
    """Return three convolutions with batch normalisation, two of them strided, and a head."""
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 16, 2), (16, 32, 2), (32, 64, 1)):
        layers += [*normalized(before, after, 3, stride), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, SIGNS))


def text(count: int, generator: torch.Generator, valid: bool) -> tuple[Tensor, Tensor]:
    """Return characters and those that follow them, ``[count, CONTEXT]`` each."""
    inputs, targets = windows(characters()[valid], count, generator)
    return inputs[:, :CONTEXT], targets[:, :CONTEXT]


def small_kinds(count: int, generator: torch.Generator, valid: bool) -> tuple[Tensor, Tensor]:
    """Return the middle ``[count, 1, 12, 12]`` of images of shapes, and their kinds."""
    images, labels = kinds(count, generator, valid)
    return images[:, :, 2:14, 2:14].contiguous(), labels


def coloured_kinds(count: int, generator: torch.Generator, valid: bool) -> tuple[Tensor, Tensor]:
    """Return shapes in colour on smooth grounds ``[count, 3, 16, 16]``, and their kinds."""
    images, labels = kinds(count, generator, valid)
    colour = torch.rand(count, 3, 1, 1, generator=generator) + 0.3
    return images * colour + 0.5 * smooth(count, 3, generator), labels


def smooth(count: int, knots: int, generator: torch.Generator) -> Tensor:
    """Return random images ``[count, 3, 16, 16]``, interpolated between `knots` x `knots` pixels."""
    pixels = torch.randn(count, 3, knots, knots, generator=generator)
    return functional.interpolate(pixels, (16, 16), mode="bilinear", align_corners=True)


def correlated(count: int, generator: torch.Generator, _: bool) -> tuple[Tensor, Tensor]:
    """Return correlated features of different scales ``[count, FEATURES]``, and the classes they were drawn from."""
    fixed = torch.Generator().manual_seed(123)
    means = torch.randn(CLASSES, FEATURES, generator=fixed) * 0.9
    bases = [torch.linalg.qr(torch.randn(FEATURES, FEATURES, generator=fixed))[0] for _ in range(CLASSES)]
    roots = torch.stack(bases) * torch.logspace(0.2, -0.5, FEATURES)  # of the classes' covariances
    mixing = torch.randn(FEATURES, FEATURES, generator=fixed) * torch.logspace(0.4, -0.6, FEATURES) / FEATURES**0.5
    labels = torch.randint(CLASSES, (count,), generator=generator)
    normal = torch.randn(count, FEATURES, generator=generator)
    features = means[labels] * 0.12 + torch.einsum("nd,ned->ne", normal, roots[labels])
    return features @ mixing + 0.02 * torch.randn(count, FEATURES, generator=generator), labels


def taught(count: int, generator: torch.Generator, _: bool) -> tuple[Tensor, Tensor]:
    """Return correlated inputs ``[count, 40]``, and the classes that a fixed network, the teacher, finds."""
    with torch.random.fork_rng():
        torch.manual_seed(77)
        teacher = perceptron(40, 64, 64, 10).requires_grad_(False)
        for layer in teacher[::2]:
            layer.weight.mul_(2)
        mixing = torch.randn(40, 40) * torch.logspace(0.3, -0.9, 40) / 40**0.5 * 2
    inputs = torch.randn(count, 40, generator=generator) @ mixing
    return inputs, teacher(inputs).argmax(1)


def strokes(count: int, generator: torch.Generator, side: int, jitter: float) -> tuple[Tensor, Tensor]:
    """Return signs of two smooth strokes ``[count, 1, side, side]``, and their kinds."""
    labels = torch.randint(SIGNS, (count,), generator=generator)
    templates = torch.rand(SIGNS, 2, 3, 2, generator=torch.Generator().manual_seed(5))  # strokes, knots, x and y
    knots = templates[labels] + jitter * torch.randn(count, 2, 3, 2, generator=generator)
    knots = (knots - 0.5) * (0.8 + 0.4 * torch.rand(count, 1, 1, 1, generator=generator)) + 0.5
    knots = knots + 0.08 * torch.randn(count, 1, 1, 2, generator=generator)
    t = torch.linspace(0, 1, 10)[None, None, :, None]
    points = (1 - t) ** 2 * knots[:, :, :1] + 2 * t * (1 - t) * knots[:, :, 1:2] + t**2 * knots[:, :, 2:]
    points = points.flatten(1, 2) * (side - 3) + 1
    grid = torch.cartesian_prod(torch.arange(float(side)), torch.arange(float(side)))
    images = torch.exp(-torch.cdist(points, grid.expand(count, -1, -1)).amin(1).square() * 1.5)
    return images.view(count, 1, side, side), labels


def noisy_signs(count: int, generator: torch.Generator, _: bool) -> tuple[Tensor, Tensor]:
    """Return noisy signs ``[count, 1, 9, 9]``, and their kinds."""
    images, labels = strokes(count, generator, 9, 0.09)
    return images + 0.3 * torch.randn(images.shape, generator=generator), labels


def coloured_signs(count: int, generator: torch.Generator, valid: bool) -> tuple[Tensor, Tensor]:
    """Return signs in colour ``[count, 3, 16, 16]``, on rougher grounds in validation, and their kinds."""
    images, labels = strokes(count, generator, 16, 0.07)
    ground = smooth(count, 5, generator)
    rough = functional.interpolate(torch.randn(count, 3, 8, 8, generator=generator), (16, 16))
    ground = ground + (0.6 if valid else 0.3) * rough
    colour = torch.randn(count, 3, 1, 1, generator=generator) * 0.7 + 0.8
    noise = 0.15 * torch.randn(count, 3, 16, 16, generator=generator)
    return ground * (1 - images) + images * colour + noise, labels


CROSS_ENTROPY = functional.cross_entropy
GPT = Task(lambda: Language(64, 2), text, language_loss, 16, 256)
MIXTURE = Task(lambda: perceptron(FEATURES, 128, 128, 64, CLASSES), correlated, CROSS_ENTROPY, 256, 8192)
TEACHER = Task(lambda: perceptron(40, 160, 160, 80, 10, activation=nn.ReLU), taught, CROSS_ENTROPY, 256, 8192)
# Of each task the steps of a run and the layers next to the loss.
TASKS: dict[str, tuple[Task, int, list[str]]] = {
    "gpt": (GPT, 200, ["head"]),
    "gpt600": (GPT, 600, ["head"]),
    "fused": (replace(open_questions.TASKS["tied"], batch=16), 150, ["head"]),
    "untied": (replace(open_questions.TASKS["untied"], batch=16), 150, ["head"]),
    "mix": (MIXTURE, 300, ["6"]),
    "mix900": (MIXTURE, 900, ["6"]),
    "teach": (TEACHER, 300, ["6"]),
    "curves": (open_questions.TASKS["curves"], 200, ["14"]),
    "strided": (Task(strided, coloured_signs, CROSS_ENTROPY, 64, 8192), 400, ["11"]),
    "signs": (Task(lambda: plain(16, 9, SIGNS), noisy_signs, CROSS_ENTROPY, 96, 8192), 200, ["9"]),
    "plain": (Task(lambda: plain(12, 12, len(SHAPES)), small_kinds, CROSS_ENTROPY, 128, 4096), 200, ["9"]),
    "res": (Task(lambda: Residual(12, 24, 48), coloured_kinds, CROSS_ENTROPY, 64, 4096), 300, ["head"]),
    "shapes": (open_questions.TASKS["shapes"], 150, ["kind", "place"]),
}
# The size up to which every factor is whole, or "whole": all are. On these tasks 512, also allowed, equals "whole".
VARIANTS = ("0", "64", "128", "256", "whole")
RATES = (0.02, 0.04)
# What was the default then.
DOUBLING = natgrad.Refresh(factors=natgrad.DoublingInterval(25), inverses=natgrad.DoublingInterval(25), spread=8)


def train(name: str, variant: str, lr: float, seed: int) -> float:
    """Train once; return the final validation loss."""
    task, steps, heads = TASKS[name]
    whole = variant == "whole"
    build = open_questions.natural(head="adamw", heads=heads, full_factors=whole, steps=4, refresh=DOUBLING)
    with mock.patch.object(natgrad.Spectral, "_whole_size", 0 if whole else int(variant)):
        return open_questions.train(task, build, lr, steps, seed)["loss"]


def change(losses: dict[tuple[str, str, float, int], float], name: str, variant: str, base: str) -> str:
    """Return the mean change of the loss in per cent, its standard error and the number of seeds."""
    ratios = defaultdict(list)
    for (task, other, lr, seed), loss in losses.items():
        if (task, other) == (name, variant) and (name, base, lr, seed) in losses:
            ratios[seed].append(100 * math.log(loss / losses[name, base, lr, seed]))
    changes = [mean(values) for values in ratios.values() if len(values) == len(RATES)]
    if not changes:
        return ""
    error = f"{stdev(changes) / len(changes) ** 0.5:.1f}" if len(changes) > 1 else "?"
    return f"{round(mean(changes), 1) + 0.0:.1f} ({error}) {len(changes)}"  # + 0.0 turns -0.0 into 0.0


def study(
    tasks: str, variants: str, base: str, seeds: int, journal: Path, run: Callable[[str, str, float, int], float]
) -> None:
    """Run what the journal lacks, each variant beside `base`, and print the table of all that it has."""
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    losses = {(row["task"], row["variant"], row["lr"], row["seed"]): row["loss"] for row in rows}
    chosen = [base, *(variant for variant in variants.split(",") if variant != base)]
    for seed, name, lr, variant in itertools.product(range(seeds), tasks.split(","), RATES, chosen):
        key = (name, variant, lr, seed)
        if key not in losses:
            losses[key] = run(*key)
            with journal.open("a") as file:
                row = dict(zip(("task", "variant", "lr", "seed"), key, strict=True))
                file.write(json.dumps(row | {"loss": losses[key]}) + "\n")
    table = Table("task", *chosen[1:], title=f"final loss compared with {base}, in per cent (standard error), seeds")
    for name in tasks.split(","):
        table.add_row(name, *(change(losses, name, variant, base) for variant in chosen[1:]))
    Console().print(table)
    Console().print(json.dumps(conditions()["machine"]))


def main(
    tasks: Annotated[str, typer.Option(help="Names, with commas.")] = ",".join(TASKS),
    variants: Annotated[str, typer.Option(help="With commas: sizes, or whole; compared with 0.")] = ",".join(VARIANTS),
    seeds: Annotated[int, typer.Option(help="How many to train, from 0.")] = 3,
    journal: Annotated[Path, typer.Option(help="Where runs are noted.")] = RESULTS / "muon_factors.jsonl",
) -> None:
    """Run what the journal lacks, and print the table of all that it has."""
    study(tasks, variants, "0", seeds, journal, train)


if __name__ == "__main__":
    typer.run(main)
