"""How many epochs a training must have to end at an accuracy, as the batch grows: SGD, LARS, LAMB and the recipe.

    python -m benchmarks.large_batch [--seeds 3] [--methods sgd,lars,lamb,natgrad] [--batches 128,...,8192]

The characters of the task "glyphs" at 16x16 pixels, learnt by a small convolutional network; the fonts of the test set
are unseen. What counts is the length of a training, as in tables 1 and 2 of Osawa 2019, not when an accuracy is first
seen on the way of a longer one: each training has a schedule that ends with it. Lengths go by twos, and between the two
around the target the accuracy is interpolated over the logarithm of the length.

The setting was chosen by SGD at batch 128 alone. Of 32 768 images it learns 67, 79, 82 and 83 % in 2, 4, 8 and 16
epochs: 75 % is as high as one can ask while twice the length still gains ten points, several times what seeds differ
by; take three seeds, as trainings of a few dozen steps differ by more.
(Where the curve is level, what a training needs cannot be told from chance. The target before, 85 % of the digits
alone, was reached in 1.5 epochs of 16 384: a handful of steps at large batches, by any method.)

The search is the same for all: at each batch and length at most four learning rates by seed 0, by twos from what was
best at the batch before, in the direction that is better. What is reported are other seeds. Methods that are run
replace themselves in the result and leave the others there.

LARS and LAMB are those of the package pytorch-optimizer (`pip install natgrad[benchmarks]`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, conditions, save
from benchmarks.large_batch_training import OWN, POWER, TEST, TRAIN, WARM_UP, Run, train

TARGET = 0.75
FIRST, SHORTEST, LONGEST = 1.0, 0.5, 32.0  # epochs of a training: where the smallest batch begins, and the bounds
TRIALS = 4  # learning rates a search
SEARCH_SEED = 0
FINE, COARSE = (128, 256, 512, 1024, 2048, 4096, 8192), (128, 1024, 8192)
BATCHES = {"sgd": FINE, "lars": COARSE, "lamb": COARSE, OWN: FINE}  # each method's


@dataclass(frozen=True, kw_only=True)
class Point:
    """What a method needs at a batch.

    Attributes:
        method: Its name.
        batch: Samples a step.
        factor: What was best to multiply its usual learning rate by.
        epochs: Until the target; None: `LONGEST` are too few.
        accuracy: Lengths, ascending, and the mean of the seeds at each.
    """

    method: str
    batch: int
    factor: float
    epochs: float | None
    accuracy: list[tuple[float, float]]


Trainer = Callable[[float, float, int], float]  # accuracy of a length, a factor and a seed


def climb(start: float, accuracy: Callable[[float], float]) -> float:
    """Return the best of at most `TRIALS` factors, by twos from `start` in the direction that is better."""
    found = {factor: accuracy(factor) for factor in (start, start / 2)}
    up = found[start] > found[start / 2]  # where both have diverged, down
    best = start if up else start / 2
    while len(found) < TRIALS:
        factor = best * (2.0 if up else 0.5)
        found[factor] = accuracy(factor)
        if found[factor] < found[best]:
            break
        best = factor
    return best


def needed(length: float, factor: float, seeds: int, accuracy: Trainer) -> tuple[float, list[tuple[float, float]]]:
    """Find two lengths around the target.

    Args:
        length: To begin with.
        factor: Where its search begins.
        seeds: Of which the mean counts.
        accuracy: Trains.

    Returns:
        The best factor at the last length that was searched, and lengths, ascending, with their mean accuracies.
    """

    def search(length: float) -> float:
        return climb(factor, lambda each: accuracy(length, each, SEARCH_SEED))

    def fresh(length: float) -> float:
        return mean(accuracy(length, factor, SEARCH_SEED + 1 + seed) for seed in range(seeds))

    factor = search(length)
    found = {length: fresh(length)}
    while found[length] < TARGET and length < LONGEST:
        length *= 2
        factor = search(length)
        found[length] = fresh(length)
    while found[length] >= TARGET and length == min(found) and length > SHORTEST:
        found[length / 2] = fresh(length / 2)
        if found[length / 2] >= TARGET:  # then its own search may find a better rate
            length /= 2
            if (better := search(length)) != factor:
                factor = better
                found[length] = fresh(length)
    return factor, sorted(found.items())


def crossing(found: Sequence[tuple[float, float]]) -> float | None:
    """Return where accuracies at ascending lengths reach the target, on lines over log(length); None: nowhere."""
    before: tuple[float, float] | None = None
    for length, reached in found:
        if reached >= TARGET:
            if before is None:
                return length
            share = (TARGET - before[1]) / (reached - before[1])
            return float(before[0] * (length / before[0]) ** share)
        before = length, reached
    return None


def curve(method: str, batches: Sequence[int], seeds: int, tell: Callable[[Run], None]) -> Iterator[Point]:
    """Yield what a method needs at each batch; each begins with length and factor of the batch before."""
    length, factor = FIRST, 1.0
    for batch in batches:

        def accuracy(length: float, factor: float, seed: int, batch: int = batch) -> float:
            run = train(method, batch, length, factor, seed)
            tell(run)
            return run.accuracy

        factor, found = needed(length, factor, seeds, accuracy)
        yield Point(method=method, batch=batch, factor=factor, epochs=crossing(found), accuracy=found)
        length = next((each for each, reached in found if reached >= TARGET), LONGEST)


def setting(seeds: int) -> dict[str, Any]:
    return {
        "target": TARGET,
        "samples": TRAIN,
        "test_samples": TEST,
        "longest": LONGEST,
        "trials": TRIALS,
        "seeds": seeds,
        "warm_up": WARM_UP,
        "power": POWER,
    }


def renew(name: str, seeds: int, method: str, runs: Sequence[Run], points: Sequence[Point]) -> dict[str, list[Point]]:
    """Put a method's runs and points into the result in place of its former ones.

    Results of another setting are dropped.

    Returns:
        All points by method.
    """
    former = result(name, seeds) or {"points": [], "runs": []}
    parts = {"points": points, "runs": runs}
    kept = {part: [each for each in former[part] if each["method"] != method] for part in parts}
    merged = {part: kept[part] + [asdict(each) for each in new] for part, new in parts.items()}
    save(name, {**conditions("cpu"), "setting": setting(seeds), **merged})
    return by_method(merged["points"])


def result(name: str, seeds: int) -> dict[str, Any] | None:
    """Return the result that is there; None: there is none of this setting."""
    path = RESULTS / f"{name}.json"
    former = json.loads(path.read_text()) if path.exists() else {}
    return former if former.get("setting") == json.loads(json.dumps(setting(seeds))) else None


def by_method(points: Sequence[dict[str, Any]]) -> dict[str, list[Point]]:
    """Return the points of a result by method."""
    everything = [Point(**each) for each in points]
    return {each.method: [point for point in everything if point.method == each.method] for each in everything}


def main(
    seeds: Annotated[int, typer.Option(help="Runs whose mean accuracy counts.")] = 3,
    methods: Annotated[str, typer.Option(help="Methods; empty: show what is known.")] = ",".join(BATCHES),
    batches: Annotated[str, typer.Option(help="Batch sizes; default: each method's own.")] = "",
    name: Annotated[str, typer.Option(help="Of the result.")] = "large_batch",
) -> None:
    """Search, run, and write the result."""
    torch.set_num_threads(1)
    console = Console(highlight=False)
    sizes = [int(each) for each in batches.split(",") if each]
    curves = by_method(known["points"]) if (known := result(name, seeds)) else {}
    for method in filter(None, methods.split(",")):
        runs, points = list[Run](), list[Point]()

        def tell(run: Run, runs: list[Run] = runs) -> None:
            runs.append(run)
            where = f"{run.method} {run.batch}, {run.length:g} epochs, rate {run.rate:.3g}, seed {run.seed}"
            console.print(f"{where}: {run.accuracy:.3f}, {run.seconds:.0f} s")

        for point in curve(method, sizes or BATCHES[method], seeds, tell):
            points.append(point)
            curves = renew(name, seeds, method, runs, points)
    columns = sorted({point.batch for points in curves.values() for point in points})
    table = Table("epochs", *map(str, columns), title=f"epochs to end at {TARGET:.0%} accuracy")
    for method, points in curves.items():
        needs = {point.batch: "never" if point.epochs is None else f"{point.epochs:.2g}" for point in points}
        table.add_row(method, *(needs.get(batch, "") for batch in columns))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
