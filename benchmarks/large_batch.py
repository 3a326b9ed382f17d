"""Epochs to an accuracy as the batch grows, of SGD, LARS, LAMB and the large-batch recipe.

    python -m benchmarks.large_batch [--seeds 1] [--batches 128,1024,8192] [--methods sgd,lars,lamb,natgrad,natgrad-raw]

A small convolutional network learns the digits of the task "glyphs" at 16x16 pixels; the fonts of the test set are
unseen. At each batch size every method is given the same number of epochs, over which its learning rate rises and falls
as its own paper has it, and the same search: four learning rates, with one seed. The best is run with other seeds. What
counts is when the accuracy on the test set is first reached, looked at four times an epoch (twice where that has two
steps).

LARS and LAMB are those of the package pytorch-optimizer (`pip install natgrad[benchmarks]`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from statistics import median
from time import process_time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.common import conditions, save
from natgrad import recipes
from natgrad.tasks import facts, glyphs

CLASSES, TRAIN, TEST = 10, 16384, 4096
TARGET = 0.85
LENGTHS = {64: 5, 128: 5, 256: 6, 512: 7, 1024: 8, 8192: 24}  # epochs that a method has
LOOKS = 4  # evaluations an epoch
FACTORS = (1.0, 0.25, 0.0625, 0.5)  # what a search multiplies a method's usual learning rate by
HOPELESS = 0.25  # accuracy below which a run is given up after a third of its length
WARM_UP, POWER = 0.1, 2.0  # of first-order methods: share of the length, power of the decay (You et al. 2017)
SEARCH_SEED = 0
OWN = ("natgrad", "natgrad-raw")  # the recipe, and the recipe on raw samples


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training.

    Attributes:
        method: Its name.
        batch: Samples a step.
        rate: Learning rate.
        seed: Of weights and order.
        epochs: Until the target; None: not reached.
        accuracy: At each evaluation.
        seconds: Of CPU time.
    """

    method: str
    batch: int
    rate: float
    seed: int
    epochs: float | None
    accuracy: list[float]
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
    """The large-batch recipe, in full, or without mixup and erasing, which the other methods do without too."""

    def __init__(self, model: nn.Module, batch: int, rate: float, seed: int, *, augments: bool) -> None:
        """All parts, at another learning rate."""
        row, self.augments = recipe(batch), augments
        self.optimizer = row.build_optimizer(model)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scheduler = row.build_scheduler(self.optimizer)
        self.mixup, self.erasing = row.build_mixup(CLASSES, seed=seed), row.build_erasing(seed=seed)
        self.decay, self.rescaling = row.build_decay(model), row.build_rescaling(model)
        self.preconditioner = row.build_preconditioner(model, self.optimizer)

    def augment(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mix and erase."""
        if not self.augments:
            return inputs, labels
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


def recipe(batch: int) -> recipes.LargeBatch:
    return recipes.large_batch(batch, samples=TRAIN, epochs=LENGTHS[batch])


def usual_rate(method: str, batch: int) -> float:
    """Where a search begins: the linear rule for SGD, the square root for LARS and LAMB, the recipe's own.

    Raw samples bear more than the mixed ones that the recipe's own rate is for.
    """
    times = batch / 128
    if method in OWN:
        return recipe(batch).learning_rate * (4.0 if method == "natgrad-raw" else 1.0)
    return {"sgd": 0.1 * times, "lars": 8.0 * times**0.5, "lamb": 0.01 * times**0.5}[method]


def build(method: str, model: nn.Module, batch: int, rate: float, seed: int) -> Training:
    """Return a method that trains `model`."""
    if method in OWN:
        return Recipe(model, batch, rate, seed, augments=method == "natgrad")
    steps = LENGTHS[batch] * math.ceil(TRAIN / batch)
    if method == "sgd":
        return Training(torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4), steps)
    from pytorch_optimizer import LARS, Lamb  # noqa: PLC0415

    build_one: Callable[..., Optimizer] = LARS if method == "lars" else Lamb
    return Training(build_one(model.parameters(), lr=rate, weight_decay=1e-4 if method == "lars" else 1e-2), steps)


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 8, 1), (8, 16, 2), (16, 32, 2)):
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4 * 4, CLASSES))


@cache
def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images [N, 3, 16, 16], standardised, and digits, for training and testing."""
    parts: list[Tensor] = []
    photographs = glyphs.photographs()
    for fonts, photos, count, seed in (
        (glyphs.TRAIN_FONTS, photographs[0], TRAIN, 0),
        (glyphs.TEST_FONTS, photographs[1], TEST, 1),
    ):
        drawn = math.ceil(1.1 * count * len(facts.CHARACTERS) / CLASSES)
        images, labels = glyphs.render(fonts, photos, drawn, torch.Generator().manual_seed(seed))
        chosen = (labels < CLASSES).nonzero()[:count, 0]
        parts += [functional.avg_pool2d(images[chosen], 2), labels[chosen]]
    deviation, mean = torch.std_mean(parts[0], dim=(0, 2, 3), keepdim=True)
    return (parts[0] - mean) / deviation, parts[1], (parts[2] - mean) / deviation, parts[3]


def train(method: str, batch: int, rate: float, seed: int, most: float) -> Run:
    """Train to the target, for `most` epochs at most, or until there is no hope."""
    inputs, labels, test, answers = data()
    torch.manual_seed(seed)
    model = network()
    training = build(method, model, batch, rate, seed)
    order = torch.Generator().manual_seed(seed)
    accuracy, steps, per_epoch = list[float](), 0, math.ceil(TRAIN / batch)
    reached, started = False, process_time()
    batches = (
        indices for _ in range(LENGTHS[batch]) for indices in torch.randperm(TRAIN, generator=order).split(batch)
    )
    for indices in islice(batches, round(most * per_epoch)):
        x, y = training.augment(inputs[indices], labels[indices])
        training.optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        training.step()
        steps += 1
        if steps % max(1, per_epoch // LOOKS):
            continue
        accuracy.append(measure(model, test, answers))
        reached = accuracy[-1] >= TARGET
        hopeless = accuracy[-1] < HOPELESS and steps >= LENGTHS[batch] * per_epoch / 3
        if reached or hopeless or not math.isfinite(loss.item()):
            break
    return Run(
        method=method,
        batch=batch,
        rate=rate,
        seed=seed,
        epochs=steps / per_epoch if reached else None,
        accuracy=accuracy,
        seconds=process_time() - started,
    )


@torch.no_grad()
def measure(model: nn.Module, test: Tensor, answers: Tensor) -> float:
    model.eval()
    accuracy = (model(test).argmax(1) == answers).float().mean().item()
    model.train()
    return accuracy


def search(method: str, batch: int, tell: Callable[[Run], None]) -> float:
    """Return the best learning rate: the first to reach the target, else that which came nearest.

    A run ends as soon as it cannot be the best any more.
    """
    runs: list[Run] = []
    for factor in FACTORS:
        most = min([LENGTHS[batch], *(run.epochs for run in runs if run.epochs)])
        runs.append(train(method, batch, factor * usual_rate(method, batch), SEARCH_SEED, most))
        tell(runs[-1])
    best = min(runs, key=lambda run: (run.epochs or math.inf, -run.accuracy[-1] if run.accuracy else 0.0))
    return best.rate


def main(
    seeds: Annotated[int, typer.Option(help="Runs with the best learning rate.")] = 1,
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "128,1024,8192",
    methods: Annotated[str, typer.Option(help="Methods.")] = "sgd,lars,lamb,natgrad,natgrad-raw",
    name: Annotated[str, typer.Option(help="Of the result.")] = "large_batch",
) -> None:
    """Search, run, and write the result."""
    torch.set_num_threads(1)
    console = Console(highlight=False)
    runs: list[Run] = []

    def tell(run: Run) -> None:
        runs.append(run)
        after = f"{run.epochs:g} epochs" if run.epochs else f"not reached: {run.accuracy[-1]:.3f}"
        console.print(f"{run.method} {run.batch} rate {run.rate:.3g} seed {run.seed}: {after}, {run.seconds:.0f} s")
        save(name, {**conditions("cpu"), "setting": setting(), "runs": [asdict(each) for each in runs]})

    names, sizes = methods.split(","), [int(each) for each in batches.split(",")]
    table = Table("epochs to accuracy", *(f"batch {size}" for size in sizes), title=f"accuracy {TARGET}")
    for method in names:
        cells = []
        for size in sizes:
            rate = search(method, size, tell)
            fresh = [train(method, size, rate, SEARCH_SEED + 1 + each, LENGTHS[size]) for each in range(seeds)]
            for run in fresh:
                tell(run)
            middle = median(run.epochs or math.inf for run in fresh)
            cells.append(f"{middle:g} at {rate:.3g}")
        table.add_row(method, *cells)
    console.print(table)


def setting() -> dict[str, Any]:
    return {
        "target": TARGET,
        "samples": TRAIN,
        "test_samples": TEST,
        "lengths": LENGTHS,
        "factors": FACTORS,
        "hopeless": HOPELESS,
        "warm_up": WARM_UP,
        "power": POWER,
    }


if __name__ == "__main__":
    typer.run(main)
