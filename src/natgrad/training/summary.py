"""Summaries of the runs of a comparison: medians and ranges over seeds, and shares of the reference contender's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import geometric_mean, median, median_high, median_low
from typing import Any, Literal

from natgrad.tasks import Metric

from .contenders import REFERENCE
from .result import Result

Quantity = Literal["loss", "metric"]
QUANTITIES: tuple[Quantity, ...] = ("loss", "metric")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A value over seeds.

    Attributes:
        median: The median.
        low: The smallest value.
        high: The largest value.
    """

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """The row of a contender in a table.

    Attributes:
        name: The contender.
        settings: Its fields of the job.
        seeds: The number of runs.
        diverged: The number of diverged runs.
        final: By quantity, the final value of finished runs; None if there are none.
        milliseconds: Milliseconds per step of finished runs.
        peak_bytes: Peak memory of finished runs.
        share: The preconditioner's share of the time.
    """

    name: str
    settings: Mapping[str, Any]
    seeds: int
    diverged: int
    final: Mapping[Quantity, Spread | None]
    milliseconds: float | None
    peak_bytes: float | None
    share: float


def final_value(result: Result, quantity: Quantity) -> float:
    """Return a run's final loss or metric: the median over the last tenth of its points, at least one."""
    tail = result.points[-max(1, len(result.points) // 10) :]
    return float(median(getattr(point, quantity) for point in tail))


def targets(results: Mapping[str, Sequence[Result]], metric: Metric) -> Mapping[Quantity, float]:
    """Return the reference contender's median final loss and metric; empty if it has no finished run.

    Of an even number of runs it is the worse of the two in the middle, which more than half of the runs reach.
    """
    finished = [result for result in results.get(REFERENCE, ()) if result.status == "finished"]
    if not finished:
        return {}
    losses, metrics = ([final_value(result, quantity) for result in finished] for quantity in QUANTITIES)
    return {
        "loss": median_high(losses),
        "metric": median_high(metrics) if metric.better == "lower" else median_low(metrics),
    }


def summarise(name: str, settings: Mapping[str, Any], results: Sequence[Result]) -> Row:
    """Return the row of a contender with these settings, whose `results` are one per seed."""
    finished = [result for result in results if result.status == "finished"]
    last = [result.points[-1] for result in finished]
    return Row(
        name=name,
        settings=settings,
        seeds=len(results),
        diverged=sum(result.status == "diverged" for result in results),
        final={
            quantity: spread([final_value(result, quantity) for result in finished]) if finished else None
            for quantity in QUANTITIES
        },
        milliseconds=median(1000 * point.seconds / point.step for point in last) if last else None,
        peak_bytes=median(point.peak_bytes for point in last) if last else None,
        share=median(point.share for point in last) if last else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a contender needs beside the reference contender; medians over seeds.

    Attributes:
        steps: The steps to the reference's final test metric, as a share of the run. Infinite: it is not reached.
        seconds: The training time to it, as a share of the reference's run. Infinite: it is not reached.
        run_seconds: The training time of its run, as a share of the reference's.
        error: The final test error over the reference's: the metric, or 1 less the metric if higher is better.
    """

    steps: float
    seconds: float
    run_seconds: float
    error: float


def shares(results: Mapping[str, Sequence[Result]], metric: Metric) -> Mapping[str, Share]:
    """Return the share of each contender with a finished run; empty without one of the reference contender."""
    target = targets(results, metric).get("metric")
    finished = {name: [run for run in runs if run.status == "finished"] for name, runs in results.items()}
    if target is None:
        return {}

    def error(runs: Sequence[Result]) -> float:
        value = median(final_value(run, "metric") for run in runs)
        return value if metric.better == "lower" else 1 - value

    def seconds(runs: Sequence[Result]) -> float:
        return median(run.points[-1].seconds for run in runs)

    reference = finished[REFERENCE]
    length = median(run.points[-1].step for run in reference)
    found = {}
    for name, runs in finished.items():
        if runs:
            steps, passed = zip(*(_crossing(run, target, metric) for run in results[name]), strict=True)
            found[name] = Share(
                steps=median(steps) / length,
                seconds=median(passed) / seconds(reference),
                run_seconds=seconds(runs) / seconds(reference),
                error=error(runs) / error(reference) if error(reference) else inf,
            )
    return found


def verdict(by_task: Mapping[str, Mapping[str, Share]]) -> str:
    """Return one sentence on which contenders need the fewest steps and seconds, and which ends lowest.

    Geometric means over the tasks; a target that is not reached counts as the whole run. Empty with fewer than two
    contenders on all tasks, the reference contender among them.
    """
    named = set.intersection(*(set(found) for found in by_task.values()))
    if REFERENCE not in named or len(named) < 2:
        return ""

    def best(of: Callable[[Share], float], names: Collection[str]) -> tuple[str, str]:
        means = {name: geometric_mean(max(of(found[name]), 1e-9) for found in by_task.values()) for name in names}
        name = min(sorted(names), key=lambda each: means[each])
        return name, f"{means[name]:.2f}"

    there = {name for name in named if any(isfinite(found[name].steps) for found in by_task.values())} | {REFERENCE}
    steps = best(lambda share: min(share.steps, 1.0), there)
    seconds = best(lambda share: share.seconds if isfinite(share.seconds) else max(share.run_seconds, 1.0), there)
    lowest = best(lambda share: share.error, named)
    return (
        f"To {REFERENCE}'s final test value on {' and '.join(by_task)}: fewest steps {steps[0]} ({steps[1]} of "
        f"{REFERENCE}'s run), fewest seconds {seconds[0]} ({seconds[1]}); lowest test error {lowest[0]} "
        f"({lowest[1]} of {REFERENCE}'s)."
    )


def spread(values: Sequence[float]) -> Spread:
    """Return median, minimum and maximum of values."""
    return Spread(median=median(values), low=min(values), high=max(values))


def _crossing(result: Result, target: float, metric: Metric) -> tuple[float, float]:
    """Return the steps and seconds to a target metric, interpolated between two evaluations; infinite: not reached."""
    sign = 1 if metric.better == "lower" else -1
    gaps = [sign * (point.metric - target) for point in result.points]
    first = next((index for index, gap in enumerate(gaps) if gap <= 0), None)
    if first is None:
        return inf, inf
    point, before = result.points[first], result.points[max(first - 1, 0)]
    left = gaps[first] / (gaps[first] - gaps[first - 1]) if first and isfinite(gaps[first - 1]) else 0.0
    return (
        point.step - left * (point.step - before.step),
        point.seconds - left * (point.seconds - before.seconds),
    )
