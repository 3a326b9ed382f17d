"""Run the counterparts of the papers' figures: `python -m benchmarks.papers FIGURE`; without a name it lists them.

Every contender of a figure searches as many learning rates on one seed, then runs with fresh seeds at the best. Runs
are kept in `benchmarks/results/papers.jsonl`, so that an interrupted figure goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.common import RESULTS, conditions, save
from benchmarks.papers.figures import ELSEWHERE, FIGURES, Contender, Figure
from natgrad import tasks
from natgrad.cli.report.sheet import Sheet, table
from natgrad.training.job import Job
from natgrad.training.journal import Journal
from natgrad.training.result import Result
from natgrad.training.run import Output, train
from natgrad.training.search import SEED
from natgrad.training.summary import final_value

JOURNAL = RESULTS / "papers.jsonl"
PAGE = RESULTS.parent.parent / "docs" / "papers.md"
_HEAD = """# The papers' figures

Made by `python -m benchmarks.papers FIGURE`; the runs are in `benchmarks/results/papers.jsonl`. Models and data are far
smaller than the papers'. Every contender of a figure searches as many learning rates on one seed ("edge": the best is
the least or the greatest of them), and runs with three fresh seeds at the best; numbers are medians. "To target": what
a method needs to reach the reference's median final metric, over what the reference needs."""


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
    _complete(
        [job(figure, each, rate, SEED) for each in contenders.values() for rate in each.rates], journal, processes
    )
    best = {name: _best(figure, each, journal) for name, each in contenders.items()}
    fresh = {
        name: [job(figure, each, best[name], seed) for seed in range(figure.seeds)] for name, each in contenders.items()
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
    """Run the jobs that are not in the journal, as many at once as processes have one rank each."""
    missing: list[Job] = []
    for each in jobs:
        if journal.find(each) is None and each not in missing:
            missing.append(each)
    context = get_context("spawn")
    with ProcessPoolExecutor(max(1, processes // max((each.workers for each in missing), default=1)), context) as pool:
        started = {pool.submit(_train, each): each for each in missing}
        for number, done in enumerate(as_completed(started), 1):
            journal.add(started[done], done.result())
            print(f"{number} of {len(missing)} runs", flush=True)


def _train(each: Job) -> Result:
    torch.set_num_threads(1)
    return train(each, Output())


def sheet(figure: Figure, found: Sequence[Row]) -> Sheet:
    """Return the table of a figure."""
    metric = tasks.facts_of(figure.task).metric.name
    asked = figure.measure if figure.measure != "metric" else ""
    headings = ["", "learning rate", metric, "seeds", *([f"{asked} to target"] if asked else []), "paper"]
    cells = []
    for row in found:
        values = (
            ["diverged", ""]
            if row.metric is None or row.spread is None
            else [f"{row.metric:.4g}", f"{row.spread[0]:.4g} to {row.spread[1]:.4g}"]
        )
        ratio = ["missed" if row.ratio is None else f"{row.ratio:.2f}"] if asked else []
        cells.append([row.name, f"{row.rate:g}{' (edge)' if row.at_edge else ''}", *values, *ratio, row.paper])
    return Sheet(
        title=f"{figure.title}. Here: {figure.task}, embedded data",
        headings=tuple(headings),
        rows=cells,
        caption=f"Paper: {figure.paper}",
    )


def write_page() -> None:
    """Write the page of all figures that have been run, and of those that other benchmarks show."""
    parts = [_HEAD]
    for name, figure in FIGURES.items():
        path = RESULTS / f"papers_{name}.json"
        if not path.exists():
            continue
        shown = sheet(figure, [Row(**row) for row in json.loads(path.read_text())["rows"]])
        lines = [shown.headings, ["---"] * len(shown.headings), *shown.rows]
        parts += [f"## {figure.title}", f"`{name}`: {figure.paper}. Here: `{figure.task}`, embedded data."]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    parts += ["## Elsewhere", "\n".join(f"- {name}: {reason}." for name, reason in ELSEWHERE.items())]
    PAGE.write_text("\n\n".join(parts) + "\n")


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Figures; left out: list them.")] = None,
    processes: Annotated[int, typer.Option(help="Ranks that train at once.")] = 2,
    journal: Annotated[Path, typer.Option(help="The file of finished runs.")] = JOURNAL,
) -> None:
    """Run figures and print their tables."""
    console = Console(width=140)
    if not names:
        for name, figure in FIGURES.items():
            console.print(f"{name}: {figure.title}", highlight=False)
        for name, reason in ELSEWHERE.items():
            console.print(f"{name}: {reason}", highlight=False)
        return
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: not among {', '.join(FIGURES)}", param_hint="NAMES")
    known = Journal(journal)
    for name in names:
        found = run(FIGURES[name], known, processes=processes)
        console.print(table(sheet(FIGURES[name], found)))
        save(f"papers_{name}", {**conditions(), "rows": [asdict(row) for row in found]})
    write_page()


if __name__ == "__main__":
    typer.run(main)
