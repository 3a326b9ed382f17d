"""Summaries of the runs of a comparison: medians and ranges over seeds, and the cost to reach a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf
from statistics import median
from typing import Any, Literal

from natgrad.tasks import Metric

from .contenders import REFERENCE
from .result import Point, Result

Quantity = Literal["loss", "metric"]
QUANTITIES: tuple[Quantity, ...] = ("loss", "metric")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A value over seeds; infinite for a seed that did not reach the target.

    Attributes:
        median: The median.
        low: The smallest value.
        high: The largest value.
    """

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """The cost to reach a target.

    Attributes:
        reached: The number of seeds that reached it.
        steps: Optimizer steps.
        seconds: Training time.
        peak_bytes: Peak memory.
    """

    reached: int
    steps: Spread
    seconds: Spread
    peak_bytes: Spread


@dataclass(frozen=True, kw_only=True)
class Row:
    """The row of a contender in a table.

    Attributes:
        name: The contender.
        settings: Its fields of the job.
        seeds: The number of runs.
        diverged: The number of diverged runs.
        crossings: By quantity, the cost to reach the target, if there is one.
        final: By quantity, the final value of finished runs; None if there are none.
        milliseconds: Milliseconds per step of finished runs.
        share: The preconditioner's share of the time.
    """

    name: str
    settings: Mapping[str, Any]
    seeds: int
    diverged: int
    crossings: Mapping[Quantity, Crossing]
    final: Mapping[Quantity, Spread | None]
    milliseconds: float | None
    share: float


def final_value(result: Result, quantity: Quantity) -> float:
    """Return a run's final loss or metric: the median over the last tenth of its points, at least one."""
    tail = result.points[-max(1, len(result.points) // 10) :]
    return float(median(getattr(point, quantity) for point in tail))


def targets(results: Mapping[str, Sequence[Result]]) -> Mapping[Quantity, float]:
    """Return the reference contender's median final loss and metric; empty if it has no finished run."""
    finished = [result for result in results.get(REFERENCE, ()) if result.status == "finished"]
    if not finished:
        return {}
    return {quantity: median(final_value(result, quantity) for result in finished) for quantity in QUANTITIES}


def summarise(
    name: str,
    settings: Mapping[str, Any],
    results: Sequence[Result],
    metric: Metric,
    target: Mapping[Quantity, float],
) -> Row:
    """Return the row of a contender.

    Args:
        name: The contender.
        settings: Its fields of the job.
        results: One per seed.
        metric: The task's metric.
        target: Loss and metric to reach; may be empty.
    """
    finished = [result for result in results if result.status == "finished"]
    last = [result.points[-1] for result in finished]
    return Row(
        name=name,
        settings=settings,
        seeds=len(results),
        diverged=sum(result.status == "diverged" for result in results),
        crossings={quantity: _crossing(results, quantity, target[quantity], metric) for quantity in target},
        final={
            quantity: spread([final_value(result, quantity) for result in finished]) if finished else None
            for quantity in QUANTITIES
        },
        milliseconds=median(1000 * point.seconds / point.step for point in last) if last else None,
        share=median(point.share for point in last) if last else 0.0,
    )


def spread(values: Sequence[float]) -> Spread:
    """Return median, minimum and maximum of values."""
    return Spread(median=median(values), low=min(values), high=max(values))


def ratio(value: Spread, reference: Spread) -> float | None:
    """Return the ratio of medians, or None if one of them is infinite."""
    return None if isinf(value.median) or isinf(reference.median) else value.median / reference.median


def _crossing(results: Sequence[Result], quantity: Quantity, target: float, metric: Metric) -> Crossing:
    higher = quantity == "metric" and metric.better == "higher"

    def reached(point: Point) -> bool:
        value: float = getattr(point, quantity)
        return value >= target if higher else value <= target

    first = [next(filter(reached, result.points), None) for result in results]
    return Crossing(
        reached=sum(point is not None for point in first),
        steps=spread([point.step if point else inf for point in first]),
        seconds=spread([point.seconds if point else inf for point in first]),
        peak_bytes=spread([point.peak_bytes if point else inf for point in first]),
    )
