"""From runs to scores: crossings, targets, and what a missed target counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from benchmarks.scoreboard.run import EVALUATIONS, Result
from benchmarks.scoreboard.timing import cost, steps_within

Curve = list[float]


def middle(curves: Sequence[Curve]) -> Curve:
    """Return the median of curves point by point; what a diverged run lacks is infinite."""
    length = EVALUATIONS + 1
    full = [curve + [math.inf] * (length - len(curve)) for curve in curves]
    return [median(values) for values in zip(*full, strict=True)]


def smooth(curve: Curve) -> Curve:
    """Return geometric means over three neighbours; the first and the last point stay as they are."""
    inner = [math.prod(curve[at - 1 : at + 2]) ** (1 / 3) for at in range(1, len(curve) - 1)]
    return [curve[0], *inner, curve[-1]]


def crossing(curve: Curve, target: float, steps: int) -> float | None:
    """Return the step at which a curve first reaches the target, by lines over log(loss); None: it does not."""
    smoothed = smooth(curve)
    for at, (before, after) in enumerate(pairwise(smoothed)):
        if before <= target:
            return steps * at / (len(curve) - 1)
        if after <= target:
            fraction = 0.0 if math.isinf(before) else math.log(before / target) / math.log(before / after)
            return steps * (at + (fraction if math.isfinite(before) else 1.0)) / (len(curve) - 1)
    return None


def loss_at(curve: Curve, step: float, steps: int) -> float:
    """Return the loss after a step, by lines over log(loss) of the smoothed curve; after the end, the last."""
    place = min(1.0, step / steps) * (len(curve) - 1)
    at = min(int(place), len(curve) - 2)
    smoothed = smooth(curve)
    before, after = smoothed[at], smoothed[at + 1]
    if not math.isfinite(before * after):
        return after if place - at >= 1 else math.inf
    return math.exp(math.log(before) + (place - at) * math.log(after / before))


def geometric(values: Sequence[float]) -> float:
    """Return the geometric mean; infinite where a value is."""
    return math.inf if any(map(math.isinf, values)) else math.exp(sum(map(math.log, values)) / len(values))


@dataclass(frozen=True, kw_only=True)
class Reached:
    """When a target was reached.

    Attributes:
        steps: Steps over the budget, those of the run; 1 where the target was missed.
        seconds: Seconds over those of AdamW's run. A missed target scores the whole run, the method's own or AdamW's,
            whichever took longer.
        missed: Whether it was not reached.
    """

    steps: float
    seconds: float
    missed: bool


@dataclass(frozen=True, kw_only=True)
class Score:
    """A method on a task.

    Attributes:
        final: The median final validation loss.
        spread: The lowest and the highest.
        training: The median of the training loss in the last part of the run.
        equal_seconds: The loss after as many seconds as AdamW's run, on the way of a run of the same length.
        step: Mean cost of a step over AdamW's.
        first: When T1 was reached.
        second: When T2 was reached.
        curve: The median curve.
    """

    final: float
    spread: tuple[float, float]
    training: float
    equal_seconds: float
    step: float
    first: Reached
    second: Reached
    curve: Curve


def targets(curves: Mapping[str, Curve], rivals: Sequence[str], reference: str) -> tuple[float, float]:
    """Return (T1, T2): the median final loss of AdamW, and that of the best rival."""
    return curves[reference][-1], min(curves[name][-1] for name in rivals)


def reached(curve: Curve, target: float, steps: int, ratios: Sequence[float], block: int) -> Reached:
    """Say when a target was reached."""
    found = crossing(curve, target, steps)
    if found is None:
        return Reached(steps=1.0, seconds=max(1.0, cost(steps, ratios, block) / steps), missed=True)
    return Reached(steps=found / steps, seconds=cost(found, ratios, block) / steps, missed=False)


def score(
    results: Sequence[Result], target: tuple[float, float], steps: int, ratios: Sequence[float], block: int
) -> Score:
    """Return the score of a method on a task, from the runs of its fresh seeds."""
    curve = middle([result.validation for result in results])
    finals = [result.final for result in results]
    training = median(result.training[-1] if not result.diverged else math.inf for result in results)
    first, second = (reached(curve, each, steps, ratios, block) for each in target)
    return Score(
        final=curve[-1],
        spread=(min(finals), max(finals)),
        training=training,
        equal_seconds=loss_at(curve, steps_within(steps, ratios, block), steps),
        step=cost(steps, ratios, block) / steps,
        first=first,
        second=second,
        curve=curve,
    )
