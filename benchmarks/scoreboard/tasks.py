"""The tasks of the scoreboard: data, model, loss and length of each.

Six are natgrad's embedded tasks, in sizes of the board's own. Where real data are too few, rows are generated:

- `autoencoder` and `digits` move, turn and scale the scans: the training scans for training, the others for validation.
- `tabular` draws patients from Gaussian mixtures fitted to the measurements of each diagnosis. The class to find is the
  component, so that the classes overlap.
- `poisson` is validated on fresh points by the loss that it trains on.

`mixer`, `automaton`, `gratings` and `patches` are FROZEN. They were designed before any method of natgrad's had run on
them, and serve to check what was chosen elsewhere. Never choose a default, a range or a variant by them.

Every validation set has at least 2,000 rows, or positions where each position has a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.mixture import GaussianMixture
from sklearn.preprocessing import StandardScaler
from torch import Generator, Tensor, nn
from torch.nn import functional

from natgrad import tasks
from natgrad.tasks import facts, glyphs, poisson, text
from natgrad.tasks.digits import scans
from natgrad.tasks.tabular import FEATURES

Data = tuple[Tensor, Tensor, Tensor, Tensor]
CONTEXT, WIDTH = 32, 64  # of `text`
NOISE = 0.25  # of the pixels of `digits`
COMPONENTS = 4  # of the mixture of each diagnosis
SPREAD = 2.0  # by which the components of `tabular` are widened, so that they overlap
SYMBOLS, STATES, LENGTH = 24, 12, 24  # of `automaton`


@dataclass(frozen=True, kw_only=True)
class BoardTask:
    """A task as the scoreboard trains it.

    Attributes:
        name: Its name.
        steps: N, the steps of the short horizon.
        batch: Samples a step.
        load: Returns inputs and targets for training, then for validation.
        model: Builds the model from torch's global generator.
        loss: Of outputs and targets, a mean.
        reduction: Over what the loss is a mean, as `natgrad.Preconditioner` understands it.
        frozen: Whether the task must never be used to choose anything.
        revision: Counts changes that make earlier results worthless.
    """

    name: str
    steps: int
    batch: int
    load: Callable[[], Data]
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    reduction: Literal["mean", "tokens"] = "mean"
    frozen: bool = False
    revision: int = 1

    def data(self) -> Data:
        """Return inputs and targets for training, then for validation; loaded once a process."""
        return _loaded(self.name, self.load)


@cache
def _loaded(_: str, load: Callable[[], Data]) -> Data:
    return load()


def moved(images: Tensor, copies: int, seed: int) -> Tensor:
    """Return `copies` of images [N, 8, 8], each turned, scaled and shifted a little: [copies * N, 8, 8]."""
    repeated = images.repeat(copies, 1, 1)[:, None]
    turn, scale, right, down = torch.rand(4, len(repeated), generator=Generator().manual_seed(seed)) * 2 - 1
    turn, scale = math.radians(15) * turn, 1 + 0.15 * scale
    cosine, sine = turn.cos() / scale, turn.sin() / scale
    rows = (torch.stack((cosine, sine, 0.2 * right), 1), torch.stack((-sine, cosine, 0.2 * down), 1))
    grid = functional.affine_grid(torch.stack(rows, 1), list(repeated.shape), align_corners=False)
    return functional.grid_sample(repeated, grid, align_corners=False)[:, 0].clamp(0, 1)


def autoencoder() -> Data:
    train, _, test, _ = scans()
    inputs, held = moved(train, 48, 0).flatten(1), moved(test, 8, 1).flatten(1)
    return inputs, inputs, held, held


def digits() -> Data:
    train, labels, test, answers = scans()
    noise = Generator().manual_seed(2)
    parts = []
    for images, digit, copies, seed in ((train, labels, 48, 0), (test, answers, 8, 1)):
        rows = moved(images, copies, seed)
        parts += [(rows + NOISE * torch.randn(rows.shape, generator=noise))[:, None], digit.repeat(copies)]
    return parts[0], parts[1], parts[2], parts[3]


def rendered(train: int, held: int, *, gray: bool, seed: int) -> Data:
    """Render about so many digits at 16x16 pixels; those for validation have other fonts and backgrounds.

    Returns:
        Images [N, C, 16, 16], standardised, with their digit.
    """
    parts: list[Tensor] = []
    photographs = glyphs.photographs()
    fonts = (glyphs.TRAIN_FONTS, glyphs.TEST_FONTS)
    for part, count in enumerate((train, held)):
        generator = Generator().manual_seed(2 * seed + part)
        images, labels = glyphs.render(fonts[part], photographs[part], 4 * count, generator)
        images, labels = functional.avg_pool2d(images, 2)[labels < facts.DIGITS], labels[labels < facts.DIGITS]
        parts += [images.mean(1, keepdim=True) if gray else images, labels]
    deviation, middle = torch.std_mean(parts[0], dim=(0, 2, 3), keepdim=True)
    return (parts[0] - middle) / deviation, parts[1], (parts[2] - middle) / deviation, parts[3]


def convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 16, 2), (16, 32, 2), (32, 64, 1)):
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, facts.DIGITS))


def bytes_of_python() -> Data:
    train, test = text.sources()
    return (*text.windows(train, 8192, CONTEXT).tensors, *text.windows(test, 128, CONTEXT).tensors)


def patients() -> Data:
    data = load_breast_cancer()
    rows = StandardScaler().fit_transform(data.data)
    generator = Generator().manual_seed(0)
    counts, drawn, labels = (196608, 4096), [], []
    for diagnosis in range(2):
        fitted = GaussianMixture(COMPONENTS, reg_covar=1e-2, random_state=0).fit(rows[data.target == diagnosis])
        for mean, root in zip(fitted.means_, map(torch.from_numpy, fitted.covariances_), strict=True):
            scale = SPREAD * torch.linalg.cholesky(root)
            count = sum(counts) // (2 * COMPONENTS)
            normal = torch.randn(count, len(mean), generator=generator, dtype=torch.float64)
            labels += [len(drawn)] * count
            drawn.append(torch.from_numpy(mean) + normal @ scale.T)
    order = torch.randperm(sum(counts), generator=generator)
    inputs, targets = torch.cat(drawn).float()[order], torch.tensor(labels)[order]
    return inputs[: counts[0]], targets[: counts[0]], inputs[counts[0] :], targets[counts[0] :]


def perceptron() -> nn.Module:
    widths = (FEATURES, 128, 128, 64)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 2 * COMPONENTS))


def points(seed: int, inside: int, boundary: int) -> tuple[Tensor, Tensor]:
    """Draw points of the unit square and of its edges, with what natgrad's task asks for there."""
    generator = Generator().manual_seed(seed)
    interior, edges = torch.rand(inside, 2, generator=generator), torch.rand(boundary, 2, generator=generator)
    side = torch.randint(4, (boundary,), generator=generator)
    edges[torch.arange(boundary), side % 2] = (side // 2).float()
    inputs = torch.cat((functional.pad(interior, (0, 1)), functional.pad(edges, (0, 1), value=1.0)))
    weights = torch.where(inputs[:, 2:] > 0, poisson.BOUNDARY_WEIGHT, 1.0)
    return inputs, weights * poisson.solution(inputs[:, :2])


def collocation() -> Data:
    return (*points(0, 12288, 4096), *points(1, 1536, 512))


class Mixer(nn.Module):
    """Perceptrons over the patches of a gray image and over their features in turn (Tolstikhin et al. 2021).

    Maps images [B, 1, 16, 16] to logits [B, 10].
    """

    def __init__(self, width: int = 48, blocks: int = 2, patch: int = 4) -> None:
        """Draw the layers."""
        super().__init__()
        self.patch, count = patch, (16 // patch) ** 2
        self.embed = nn.Linear(patch**2, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * blocks + 1))
        self.over_patches = nn.ModuleList(_perceptron(count, 2 * count) for _ in range(blocks))
        self.over_features = nn.ModuleList(_perceptron(width, 2 * width) for _ in range(blocks))
        self.head = nn.Linear(width, facts.DIGITS)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        rows = self.embed(functional.unfold(images, self.patch, stride=self.patch).transpose(1, 2))
        for index, (patches, features) in enumerate(zip(self.over_patches, self.over_features, strict=True)):
            rows = rows + patches(self.norms[2 * index](rows).transpose(1, 2)).transpose(1, 2)
            rows = rows + features(self.norms[2 * index + 1](rows))
        logits: Tensor = self.head(self.norms[-1](rows).mean(1))
        return logits


def _perceptron(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Recurrent(nn.Module):
    """A gated recurrent cell that predicts the next symbol: maps symbols [B, T] to logits [B, T, 24]."""

    def __init__(self, width: int = 64) -> None:
        """Draw the layers."""
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, width)
        self.cell = nn.GRUCell(width, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        embedded = self.symbols(inputs)
        state, states = torch.zeros_like(embedded[:, 0]), []
        for symbol in embedded.unbind(1):
            state = self.cell(symbol, state)
            states.append(state)
        logits: Tensor = self.head(functional.gelu(self.hidden(torch.stack(states, 1))))
        return logits


def automaton() -> Data:
    """Draw symbols emitted by two hidden Markov chains at once, with the symbols that follow them."""
    generator = Generator().manual_seed(0)
    moves = torch.stack([torch.eye(STATES)[torch.randperm(STATES, generator=generator)] for _ in range(2)])
    moves = 0.9 * moves + 0.1 / STATES  # each state has a successor that it nearly always takes
    emissions = torch.softmax(3 * torch.randn(STATES, STATES, SYMBOLS, generator=generator), -1)
    count = 8192 + 256
    chains = torch.randint(STATES, (2, count), generator=generator)
    symbols = []
    for _ in range(LENGTH + 1):
        symbols.append(torch.multinomial(emissions[chains[0], chains[1]], 1, generator=generator)[:, 0])
        drawn = [torch.multinomial(moves[chain][chains[chain]], 1, generator=generator)[:, 0] for chain in range(2)]
        chains = torch.stack(drawn)
    sequences = torch.stack(symbols, 1)
    train, held = sequences[:8192], sequences[8192:]
    return train[:, :-1], train[:, 1:], held[:, :-1], held[:, 1:]


ORIENTATIONS, FREQUENCIES = 8, 2  # of `gratings`


def gratings() -> Data:
    """Draw sums of two waves at random phases in noise; the class is orientation and frequency of the stronger one."""
    generator, count = Generator().manual_seed(0), 16384 + 2048
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    classes = torch.randint(ORIENTATIONS * FREQUENCIES, (2, count), generator=generator)
    angle = math.pi * (classes % ORIENTATIONS + 0.4 * torch.randn(classes.shape, generator=generator)) / ORIENTATIONS
    waves = 2 * math.pi * (0.12 + 0.12 * (classes // ORIENTATIONS))
    phase = 2 * math.pi * torch.rand(classes.shape, generator=generator)
    along = angle.cos()[..., None, None] * columns + angle.sin()[..., None, None] * rows
    both = (waves[..., None, None] * along + phase[..., None, None]).sin()
    images = both[0] + 0.6 * both[1] + torch.randn(count, 16, 16, generator=generator)
    images = images[:, None]
    return images[:16384], classes[0, :16384], images[16384:], classes[0, 16384:]


class Residual(nn.Module):
    """A residual network with batch normalisation: maps images [B, 1, 16, 16] to logits [B, 16]."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        """Draw the layers."""
        super().__init__()
        self.stem = _normalised(nn.Conv2d(1, widths[0], 3, padding=1, bias=False))
        self.blocks, self.shortcuts = nn.ModuleList(), nn.ModuleList()
        for before, after in pairwise(widths):
            inner = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
            outer = nn.Conv2d(after, after, 3, padding=1, bias=False)
            self.blocks.append(nn.Sequential(_normalised(inner), nn.ReLU(), _normalised(outer)))
            self.shortcuts.append(_normalised(nn.Conv2d(before, after, 1, stride=2, bias=False)))
        self.head = nn.Linear(widths[-1], ORIENTATIONS * FREQUENCIES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        maps = self.stem(images).relu()
        for block, shortcut in zip(self.blocks, self.shortcuts, strict=True):
            maps = (shortcut(maps) + block(maps)).relu()
        logits: Tensor = self.head(maps.mean((2, 3)))
        return logits


def _normalised(convolution: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(convolution, nn.BatchNorm2d(convolution.out_channels))


class Block(nn.Module):
    """Self-attention over all positions and a perceptron, each after a norm; made of linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        """Draw the layers."""
        super().__init__()
        self.heads, self.packed, self.mix = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, rows: Tensor) -> Tensor:
        """Map [B, T, width] to the same shape."""
        parts = self.packed(self.before(rows)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        rows = rows + self.mix(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        moved: Tensor = rows + self.perceptron(self.between(rows))
        return moved


class VisionTransformer(nn.Module):
    """Transformer blocks over the patches of a gray image (Dosovitskiy et al. 2021).

    Maps images [B, 1, 16, 16] to logits [B, 10].
    """

    def __init__(self, width: int = 48, blocks: int = 2, heads: int = 4, patch: int = 4) -> None:
        """Draw the layers."""
        super().__init__()
        self.embed = nn.Conv2d(1, width, patch, stride=patch)
        self.places = nn.Embedding((16 // patch) ** 2, width)
        nn.init.normal_(self.places.weight, std=0.5)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, facts.DIGITS)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        rows = self.embed(images).flatten(2).transpose(1, 2)
        rows = self.blocks(rows + self.places(torch.arange(rows.shape[1])))
        logits: Tensor = self.head(self.norm(rows).mean(1))
        return logits


def over_positions(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy in nats, the mean over all positions."""
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


TASKS = {
    task.name: task
    for task in (
        BoardTask(
            name="autoencoder",
            steps=360,
            batch=256,
            load=autoencoder,
            model=lambda: tasks.get("autoencoder").model(),
            loss=functional.binary_cross_entropy_with_logits,
        ),
        BoardTask(
            name="digits",
            steps=240,
            batch=128,
            load=digits,
            model=lambda: tasks.get("digits").model(),
            loss=functional.cross_entropy,
        ),
        BoardTask(
            name="glyphs",
            steps=400,
            batch=64,
            load=lambda: rendered(16384, 2048, gray=False, seed=0),
            model=convolutional,
            loss=functional.cross_entropy,
        ),
        BoardTask(
            name="text",
            steps=200,
            batch=16,
            load=bytes_of_python,
            model=lambda: text.Transformer(WIDTH, 4, 2, CONTEXT),
            loss=over_positions,
            reduction="tokens",
        ),
        BoardTask(
            name="tabular",
            steps=400,
            batch=256,
            load=patients,
            model=perceptron,
            loss=functional.cross_entropy,
        ),
        BoardTask(
            name="poisson",
            steps=600,
            batch=128,
            load=collocation,
            model=lambda: poisson.PhysicsInformedNetwork(64, 4),
            loss=functional.mse_loss,
        ),
        BoardTask(
            name="mixer",
            steps=240,
            batch=64,
            load=lambda: rendered(16384, 2048, gray=True, seed=50),
            model=Mixer,
            loss=functional.cross_entropy,
            frozen=True,
        ),
        BoardTask(
            name="automaton",
            steps=200,
            batch=64,
            load=automaton,
            model=Recurrent,
            loss=over_positions,
            reduction="tokens",
            frozen=True,
        ),
        BoardTask(
            name="gratings",
            steps=300,
            batch=64,
            load=gratings,
            model=Residual,
            loss=functional.cross_entropy,
            frozen=True,
        ),
        BoardTask(
            name="patches",
            steps=300,
            batch=64,
            load=lambda: rendered(16384, 2048, gray=True, seed=70),
            model=VisionTransformer,
            loss=functional.cross_entropy,
            frozen=True,
            revision=3,
        ),
    )
}
