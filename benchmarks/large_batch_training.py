"""One training of the benchmark of large batches: data, network, and the methods with their usual learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from natgrad import recipes
from natgrad.tasks import facts, glyphs

CLASSES, TRAIN, TEST = len(facts.CHARACTERS), 32768, 8192
WARM_UP, POWER = 0.1, 2.0  # of first-order methods: share of the length, power of the decay (You et al. 2017)
OWN = "natgrad"
MIXED = 17.5  # epochs from which the recipe mixes and erases, which both need epochs


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training.

    Attributes:
        method: Its name.
        batch: Samples a step.
        length: In epochs.
        factor: What the method's usual learning rate was multiplied by.
        rate: Learning rate.
        seed: Of weights and order.
        accuracy: At its end; 0 where the loss was not finite.
        seconds: Of CPU time.
    """

    method: str
    batch: int
    length: float
    factor: float
    rate: float
    seed: int
    accuracy: float
    seconds: float


class Training:
    """A method at work: what it does to a batch, and after a backward pass."""

    def __init__(self, optimizer: Optimizer, steps: int) -> None:
        """A first-order method over a number of steps."""
        self.optimizer = optimizer
        self.scheduler: Any = LambdaLR(optimizer, lambda step: rise_and_fall(step / steps))

    def augment(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the batch that is trained on."""
        return inputs, labels

    def step(self) -> None:
        """Change the weights."""
        self.optimizer.step()
        self.scheduler.step()


class Recipe(Training):
    """The large-batch recipe."""

    def __init__(self, model: nn.Module, row: recipes.LargeBatch, rate: float, seed: int) -> None:
        """All parts, at another learning rate."""
        self.optimizer = row.build_optimizer(model)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scheduler = row.build_scheduler(self.optimizer)
        self.mixup, self.erasing = row.build_mixup(CLASSES, seed=seed), row.build_erasing(seed=seed)
        self.decay, self.rescaling = row.build_decay(model), row.build_rescaling(model)
        self.preconditioner = row.build_preconditioner(model, self.optimizer)

    def augment(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mix and erase."""
        mixed, shares = self.mixup(inputs, labels)
        return self.erasing(mixed), shares

    def step(self) -> None:
        """Change the weights as the equations say."""
        self.decay.step()
        self.preconditioner.step()
        self.optimizer.step()
        self.rescaling.step()
        self.scheduler.step()


def rise_and_fall(done: float) -> float:
    """The learning rate of first-order methods over its peak, after a share of all steps."""
    if done < WARM_UP:
        return max(done, 1e-3) / WARM_UP
    return max(0.0, 1 - (done - WARM_UP) / (1 - WARM_UP)) ** POWER


def steps_of(batch: int, length: float) -> int:
    return max(1, round(length * TRAIN / batch))


def recipe(batch: int, length: float) -> recipes.LargeBatch:
    """Return the recipe with 2 x 2 blocks for norm layers; short trainings neither mix nor erase."""
    row = recipes.large_batch(batch, samples=TRAIN, epochs=length, norm_form="unit")
    return row if length >= MIXED else replace(row, mixup=0.0, erasing=0.0)


def usual_rate(method: str, batch: int, length: float) -> float:
    """Where a search begins: the linear rule for SGD, the square root for LARS and LAMB, the recipe's own."""
    if method == OWN:
        return recipe(batch, length).learning_rate
    times = batch / 128
    return {"sgd": 0.1 * times, "lars": 8.0 * times**0.5, "lamb": 0.01 * times**0.5}[method]


def build(method: str, model: nn.Module, batch: int, length: float, rate: float, seed: int) -> Training:
    """Return a method that trains `model`."""
    if method == OWN:
        return Recipe(model, recipe(batch, length), rate, seed)
    steps = steps_of(batch, length)
    if method == "sgd":
        return Training(torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4), steps)
    from pytorch_optimizer import LARS, Lamb  # noqa: PLC0415

    build_one: Callable[..., Optimizer] = LARS if method == "lars" else Lamb
    return Training(build_one(model.parameters(), lr=rate, weight_decay=1e-4 if method == "lars" else 1e-2), steps)


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 8, 2), (8, 16, 2), (16, 32, 1)):
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4 * 4, CLASSES))


@cache
def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images [N, 3, 16, 16], standardised, and characters, for training and testing."""
    parts: list[Tensor] = []
    photographs = glyphs.photographs()
    for fonts, photos, count, seed in (
        (glyphs.TRAIN_FONTS, photographs[0], TRAIN, 0),
        (glyphs.TEST_FONTS, photographs[1], TEST, 1),
    ):
        images, labels = glyphs.render(fonts, photos, count, torch.Generator().manual_seed(seed))
        parts += [functional.avg_pool2d(images, 2), labels]
    deviation, middle = torch.std_mean(parts[0], dim=(0, 2, 3), keepdim=True)
    return (parts[0] - middle) / deviation, parts[1], (parts[2] - middle) / deviation, parts[3]


def train(method: str, batch: int, length: float, factor: float, seed: int) -> Run:
    """Train over a length, and look at the end."""
    inputs, labels, test, answers = data()
    torch.manual_seed(seed)
    model = network()
    rate = factor * usual_rate(method, batch, length)
    training = build(method, model, batch, length, rate, seed)
    order = torch.Generator().manual_seed(seed)
    started, finite = process_time(), True
    batches = (
        indices for _ in range(math.ceil(length)) for indices in torch.randperm(TRAIN, generator=order).split(batch)
    )
    for indices in islice(batches, steps_of(batch, length)):
        x, y = training.augment(inputs[indices], labels[indices])
        training.optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        training.step()
        finite = math.isfinite(loss.item())
        if not finite:
            break
    return Run(
        method=method,
        batch=batch,
        length=length,
        factor=factor,
        rate=rate,
        seed=seed,
        accuracy=measure(model, test, answers) if finite else 0.0,
        seconds=process_time() - started,
    )


@torch.no_grad()
def measure(model: nn.Module, test: Tensor, answers: Tensor) -> float:
    model.eval()
    return (model(test).argmax(1) == answers).float().mean().item()
