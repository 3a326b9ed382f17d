"""One training run of the scoreboard."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

import natgrad
from benchmarks.scoreboard.methods import METHODS, Stepper
from benchmarks.scoreboard.tasks import TASKS, BoardTask

WARM_UP = 0.05  # share of a run in which the learning rate rises
EVALUATIONS = 20  # beside the one before the first step
CHUNK = 1024  # rows evaluated at once
RUN_REVISION = 1  # counts changes here that make earlier results worthless


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What determines a run.

    Attributes:
        task: Name of the task.
        method: Name of the method.
        rate: Learning rate.
        second: The method's second parameter.
        horizon: Multiple of the task's steps N.
        seed: Of weights and batches.
        steps: In place of `horizon` times N, for trials.
    """

    task: str
    method: str
    rate: float
    second: float
    horizon: int
    seed: int
    steps: int | None = None

    @property
    def length(self) -> int:
        """The number of steps."""
        return TASKS[self.task].steps * self.horizon if self.steps is None else self.steps

    @property
    def settings(self) -> str:
        """A hash of all else that determines the result, except for the code."""
        task, method = TASKS[self.task], METHODS[self.method]
        fixed = (task.revision, task.batch, task.steps, method.revision, WARM_UP, EVALUATIONS, RUN_REVISION)
        return hashlib.sha256(json.dumps(fixed).encode()).hexdigest()[:8]

    @property
    def key(self) -> str:
        """The key of the run in the journal."""
        return json.dumps([*asdict(self).values(), self.settings])


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run gave.

    Attributes:
        validation: Loss at step 0 and at each of `EVALUATIONS` equal parts of the run; shorter where it diverged.
        training: The mean loss of the batches in each part.
        seconds: Processor time of the steps.
        diverged: Whether a loss was not finite.
    """

    validation: list[float]
    training: list[float]
    seconds: float
    diverged: bool

    @property
    def final(self) -> float:
        """The last validation loss; infinite where the run diverged."""
        return math.inf if self.diverged else self.validation[-1]


def share(step: int, steps: int) -> float:
    """Return the share of the highest learning rate in a step: a linear rise, then half a cosine to zero."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    return (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise))) / 2


def batches(rows: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Yield places of rows without end, each row once a pass; a ragged end of a pass is left out."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(rows, generator=generator)[: rows - rows % batch].split(batch)


@torch.no_grad()
def evaluate(task: BoardTask, model: nn.Module) -> float:
    """Return the validation loss."""
    _, _, inputs, targets = task.data()
    model.eval()
    parts = zip(inputs.split(CHUNK), targets.split(CHUNK), strict=True)
    total = sum(task.loss(model(x), y).item() * len(x) for x, y in parts)
    model.train()
    return total / len(inputs)


class Training:
    """A model, its method and its batches."""

    def __init__(self, spec: Spec) -> None:
        """Build all from the seed."""
        self.spec, self.task = spec, TASKS[spec.task]
        self.inputs, self.targets, *_ = self.task.data()
        torch.manual_seed(spec.seed)
        self.model = self.task.model()
        self.stepper: Stepper = METHODS[spec.method].build(self.task, self.model, spec.rate, spec.second)
        self.batches = batches(len(self.inputs), self.task.batch, spec.seed)
        self.done = 0

    def step(self) -> float:
        """Take one step; return the loss of its batch."""
        places = next(self.batches)
        self.model.zero_grad()
        loss = self.task.loss(self.model(self.inputs[places]), self.targets[places])
        loss.backward()
        value = loss.item()
        if math.isfinite(value):
            self.stepper.step(share(self.done, self.spec.length))
        self.done += 1
        return value


def train(spec: Spec) -> Result:
    """Run a training. What fails numerically counts as diverged."""
    warnings.simplefilter("ignore", category=natgrad.NatgradWarning)
    training = Training(spec)
    validation, means = [evaluate(training.task, training.model)], list[float]()
    seconds, diverged = 0.0, False
    for part in range(EVALUATIONS):
        end = round(spec.length * (part + 1) / EVALUATIONS)
        losses, begun = list[float](), process_time()
        try:
            while training.done < end and not diverged:
                losses.append(training.step())
                diverged = not math.isfinite(losses[-1])
        except natgrad.CurvatureError:  # no usable gradient any more
            diverged = True
        except (ArithmeticError, RuntimeError) as error:  # a decomposition of numbers that are not finite
            if not numerical(error):
                raise
            diverged = True
        seconds += process_time() - begun
        found = math.inf if diverged else evaluate(training.task, training.model)
        if not math.isfinite(found):
            diverged = True
            break
        validation.append(found)
        means.append(sum(losses) / max(1, len(losses)))
    return Result(validation=validation, training=means, seconds=seconds, diverged=diverged)


def numerical(error: Exception) -> bool:
    """Whether an error speaks of numbers rather than of a mistake in the code."""
    words = ("finite", "converge", "singular", "positive-definite", "nan", "linalg", "overflow")
    return isinstance(error, (ArithmeticError, torch.linalg.LinAlgError)) or any(
        word in str(error).lower() for word in words
    )


def record(spec: Spec, result: Result) -> dict[str, Any]:
    """Return a run as a line of the journal, with six significant digits."""

    def short(values: list[float]) -> list[float]:
        return [float(f"{value:.6g}") for value in values]

    return {
        "kind": "run",
        **asdict(spec),
        "settings": spec.settings,
        "validation": short(result.validation),
        "training": short(result.training),
        "seconds": round(result.seconds, 3),
        "diverged": result.diverged,
    }


def restore(line: dict[str, Any]) -> tuple[str, Result]:
    """Return the key and the result of a line of the journal."""
    spec = [line[name] for name in ("task", "method", "rate", "second", "horizon", "seed", "steps", "settings")]
    fields = ("validation", "training", "seconds", "diverged")
    return json.dumps(spec), Result(**{name: line[name] for name in fields})
