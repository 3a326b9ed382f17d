"""The runs of a figure: what is missing is run in processes, and its rows follow from the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch

from benchmarks.papers.figures import Contender, Figure
from natgrad import tasks
from natgrad.training.job import Job
from natgrad.training.journal import Journal
from natgrad.training.result import Result
from natgrad.training.run import CONFIGURATION, Output, train
from natgrad.training.search import SEED
from natgrad.training.summary import final_value

# No default was chosen on these seeds.
FIRST_SEED = 100


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a contender did.

    Attributes:
        name: The contender.
        rate: Its best learning rate.
        at_edge: Whether that is the least or the greatest of the search.
        metric: The median final metric of its fresh seeds; None: every run diverged.
        spread: The least and the greatest.
        ratio: What it needs to reach the target, over what the reference needs; None: it misses the target, or the
            figure measures the metric.
        paper: What the paper reports.
    """

    name: str
    rate: float
    at_edge: bool
    metric: float | None
    spread: tuple[float, float] | None
    ratio: float | None
    paper: str


def job(figure: Figure, contender: Contender, rate: float, seed: int) -> Job:
    """Return the job of a run."""
    fields = {"task": figure.task, **figure.shared, **contender.settings, "learning_rate": rate, "seed": seed}
    return Job.from_json(fields)


def run(figure: Figure, journal: Journal, *, processes: int) -> list[Row]:
    """Run what is missing of a figure and return its rows."""
    contenders = figure.contenders
    if figure.first is not None:
        first = Job.from_json({"task": figure.task, **figure.first})
        folder = Path(figure.shared["start_from"])
        train(first, Output(folder=folder), resume=(folder / CONFIGURATION).exists())
    _complete(
        [job(figure, each, rate, SEED) for each in contenders.values() for rate in each.rates], journal, processes
    )
    best = {name: _best(figure, each, journal) for name, each in contenders.items()}
    fresh = {
        name: [job(figure, each, best[name], FIRST_SEED + number) for number in range(figure.seeds)]
        for name, each in contenders.items()
    }
    _complete([each for jobs in fresh.values() for each in jobs], journal, processes)
    results = {name: [_known(each, journal) for each in jobs] for name, jobs in fresh.items()}
    return rows(figure, best, results)


def rows(figure: Figure, best: Mapping[str, float], results: Mapping[str, Sequence[Result]]) -> list[Row]:
    """Return the rows of a figure from the results of the fresh seeds."""
    higher = tasks.facts_of(figure.task).metric.better == "higher"
    finals = {
        name: [final_value(each, "metric") for each in own if each.status == "finished"]
        for name, own in results.items()
    }
    target = median(finals[figure.reference]) if finals[figure.reference] else None
    needs = {name: _needs(figure, own, target, higher=higher) for name, own in results.items()}
    unit = needs[figure.reference]
    return [
        Row(
            name=name,
            rate=best[name],
            at_edge=best[name] in (min(contender.rates), max(contender.rates)),
            metric=median(finals[name]) if finals[name] else None,
            spread=(min(finals[name]), max(finals[name])) if finals[name] else None,
            ratio=needed / unit if (needed := needs[name]) is not None and unit else None,
            paper=contender.paper,
        )
        for name, contender in figure.contenders.items()
    ]


def _needs(figure: Figure, results: Sequence[Result], target: float | None, *, higher: bool) -> float | None:
    """Return the epochs or seconds at which the median metric reaches the target; None: it misses that."""
    finished = [result.points for result in results if result.status == "finished"]
    if figure.measure == "metric" or target is None or not finished:
        return None
    sign = 1 if higher else -1
    spent = [
        (
            median(point.epoch if figure.measure == "epochs" else point.seconds for point in points),
            sign * median(point.metric for point in points),
        )
        for points in zip(*finished, strict=True)
    ]
    for (before, below), (after, above) in pairwise([(0.0, float("-inf")), *spent]):
        if above >= sign * target:
            part = 1.0 if below == float("-inf") else (sign * target - below) / (above - below)
            return before + (after - before) * part
    return None


def _best(figure: Figure, contender: Contender, journal: Journal) -> float:
    """Return the learning rate with the best final metric on the seed of the search."""
    sign = 1 if tasks.facts_of(figure.task).metric.better == "higher" else -1

    def score(rate: float) -> tuple[float, float]:
        result = _known(job(figure, contender, rate, SEED), journal)
        if result.status != "finished":
            return float("-inf"), float("-inf")
        return sign * final_value(result, "metric"), -final_value(result, "loss")

    return max(contender.rates, key=score)


def _known(each: Job, journal: Journal) -> Result:
    result = journal.find(each)
    assert result is not None
    return result


def _complete(jobs: Sequence[Job], journal: Journal, processes: int) -> None:
    """Run the jobs that are not in the journal, with as many ranks at once as there are processes."""
    missing: list[Job] = []
    for each in jobs:
        if journal.find(each) is None and each not in missing:
            missing.append(each)
    done = 0
    for workers in sorted({each.workers for each in missing}):
        with ProcessPoolExecutor(max(1, processes // workers), get_context("spawn")) as pool:
            started = {pool.submit(_train, each): each for each in missing if each.workers == workers}
            for future in as_completed(started):
                result = future.result()
                if result.status == "stopped":  # by Ctrl-C, which the other runs get too
                    raise KeyboardInterrupt
                journal.add(started[future], result)
                done += 1
                print(f"{done} of {len(missing)} runs", flush=True)


def _train(each: Job) -> Result:
    torch.set_num_threads(1)
    return train(each, Output())
