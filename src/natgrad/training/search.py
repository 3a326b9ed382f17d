"""A search for hyper-parameters on a logarithmic grid, with the same number of trials for every contender."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from natgrad.errors import require, require_one_of

from .contenders import Contender
from .job import Job
from .result import Result
from .summary import final_value

Objective = Literal["loss", "metric"]

# Comparisons must not use this seed, so that settings are not tuned to their seeds.
SEED = 1000

MOST_TRIALS = 10_000


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search for one contender.

    Attributes:
        best: The searched fields of the best trial.
        log: For every trial the searched fields, status, final loss and metric, and seconds.
    """

    best: dict[str, float]
    log: list[dict[str, Any]]


def check_objective(objective: str) -> None:
    """Check the name of an objective.

    Raises:
        ValueError: The name is unknown.
    """
    require_one_of("objective", objective, *get_args(Objective))


def grid(ranges: Mapping[str, tuple[float, float]], trials: int) -> list[dict[str, float]]:
    """Return `trials` points, evenly spaced in the logarithm, including both ends.

    With two fields the grid is as square as the divisors of `trials` allow, with more points for the first field. A
    single point is the geometric mean of the ends.

    Raises:
        ValueError: `trials` is below 1.
    """
    require(trials >= 1, "search", trials, "at least 1 trial")
    names = list(ranges)
    rows = max(d for d in range(1, math.isqrt(trials) + 1) if trials % d == 0) if len(names) > 1 else 1
    counts = [trials // rows, rows][: len(names)]
    axes = [_spaced(*ranges[name], count) for name, count in zip(names, counts, strict=True)]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*axes)]


def search(
    contender: Contender,
    trials: int,
    *,
    objective: Objective,
    higher_is_better: bool,
    job: Callable[[Mapping[str, float]], Job],
    execute: Callable[[Job], Result],
) -> SearchResult:
    """Run the trials of a grid and return the best point and the log.

    Args:
        contender: The contender.
        trials: The number of runs.
        objective: The final training loss, or the final metric (if equal, the loss).
        higher_is_better: Whether a higher metric is better.
        job: Returns the job of a grid point.
        execute: Runs a job.

    Raises:
        ValueError: Every trial diverged.
    """
    tried = [(point, execute(job(point))) for point in grid(contender.ranges, trials)]
    log = [{**point, **_outcome(result)} for point, result in tried]
    finished = [index for index, entry in enumerate(log) if entry["status"] == "finished"]
    if not finished:
        raise ValueError(f"search={trials} found nothing for {contender.name}: every trial diverged")
    best = min(finished, key=lambda index: _rank(log[index], objective=objective, higher_is_better=higher_is_better))
    return SearchResult(best=tried[best][0], log=log)


def _rank(entry: Mapping[str, Any], *, objective: Objective, higher_is_better: bool) -> tuple[float, ...]:
    """Return a key that is smallest for the best trial."""
    loss, metric = float(entry["loss"]), float(entry["metric"])
    return (loss,) if objective == "loss" else (-metric if higher_is_better else metric, loss)


def _outcome(result: Result) -> dict[str, Any]:
    if not result.points:
        return {"status": result.status, "loss": None, "metric": None, "seconds": None}
    return {
        "status": result.status,
        "loss": final_value(result, "loss"),
        "metric": final_value(result, "metric"),
        "seconds": round(result.points[-1].seconds, 3),
    }


def _spaced(low: float, high: float, count: int) -> list[float]:
    """Return values from `low` to `high`, rounded to three digits."""
    if count == 1:
        return [_rounded(math.sqrt(low * high))]
    return [_rounded(low * (high / low) ** (index / (count - 1))) for index in range(count)]


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
