"""Comparisons of optimizers on the same tasks and seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from natgrad import tasks
from natgrad.errors import require, require_one_of

from . import contenders, environment, search, tuned
from .build import rehearse
from .contenders import Contender
from .files import claimed
from .job import Device, Job
from .journal import Journal
from .launch import StoppedError
from .result import Result
from .run import Output, train
from .schedules import ScheduleName
from .summary import Row, Share, shares, summarise
from .tuned import Tuned

# Called with a description of the run, the numbers of finished and of all runs, and whether the run starts now.
ReportProgress = Callable[[str, int, int, bool], None]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The settings of a comparison.

    Attributes:
        task_names: The names of the tasks.
        task_options: Options of every task, and of one, which come first: "glyphs.images".
        data: The folder of the data set of all tasks; None: embedded data.
        optimizers: The names of the contenders.
        seeds: Runs per contender, each with another seed.
        first_seed: The first seed; the others follow it.
        workers: Ranks per run.
        epochs: Length of a run by task; default: the task's.
        steps: Length of a run, instead of `epochs`.
        batch_size: Global batch size; None: the task's.
        schedule: The learning rate schedule of all contenders.
        trials: Runs of a search per contender before the comparison; 0: use tuned values.
        objective: The objective of the search.
        overrides: For each contender, fields of its job that replace searched and tuned values.
        tuned: The folder of tuned values.
        device: The device to train on.
    """

    task_names: tuple[str, ...]
    task_options: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None
    optimizers: tuple[str, ...] = contenders.NAMES
    seeds: int = 3
    first_seed: int = 0
    workers: int = 1
    epochs: Mapping[str, int] = field(default_factory=dict)
    steps: int | None = None
    batch_size: int | None = None
    schedule: ScheduleName = "cosine"
    trials: int = 0
    objective: search.Objective = "loss"
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tuned: Path = tuned.COMMITTED
    device: Device = "auto"

    def __post_init__(self) -> None:
        """Check everything before the first run.

        Raises:
            ValueError: A field is not allowed.
        """
        names = tuple(map(contenders.current_name, self.optimizers))
        object.__setattr__(self, "optimizers", names)
        overrides = {contenders.current_name(name): settings for name, settings in self.overrides.items()}
        object.__setattr__(self, "overrides", overrides)
        require(self.task_names, "task", self.task_names, tasks.known_names())
        for name, given in (("task", self.task_names), ("optimizers", self.optimizers)):
            require(len(set(given)) == len(given), name, list(given), "each given once")
        require(self.optimizers, "optimizers", self.optimizers, f"some of {', '.join(contenders.NAMES)}")
        require(self.seeds >= 1, "seeds", self.seeds, "at least 1")
        require(self.first_seed >= 0, "first_seed", self.first_seed, "at least 0")
        fits = search.SEED not in self.seed_range
        require(fits, "first_seed", self.first_seed, f"such that no seed is {search.SEED}, which searches use")
        most = search.MOST_TRIALS
        require(0 <= self.trials <= most, "search", self.trials, f"a number of trials up to {most}, or 0 for none")
        search.check_objective(self.objective)
        for name in self.task_options:
            fits = "." not in name or name.partition(".")[0] in self.task_names
            require(fits, "--set", name, f"of one of {', '.join(self.task_names)}")
        for name, settings in self.overrides.items():
            require_one_of("override", name, *self.optimizers)
            for setting in settings:
                allowed = [job_field.name for job_field in fields(Job) if job_field.name not in _SHARED]
                require_one_of(f"override {name}", setting, *allowed)
        for task in self.task_names:
            known = tuned.read(task, self.tuned)
            for name in self.optimizers:
                rehearse(self.job(task, self.contender(name, known).settings, seed=self.first_seed).resolved())

    @property
    def seed_range(self) -> range:
        """The seeds of a contender's runs."""
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def runs(self) -> int:
        """The number of runs, including those of searches."""
        return len(self.task_names) * len(self.optimizers) * (self.trials + self.seeds)

    def contender(self, name: str, known: Tuned | None) -> Contender:
        """Return a contender with tuned settings and overrides; overridden fields are not searched."""
        contender, fixed = contenders.get(name), self.overrides.get(name, {})
        best = known.settings.get(name, {}) if known else {}
        return replace(
            contender,
            settings={**contender.settings, **best, **fixed},
            ranges={setting: limits for setting, limits in contender.ranges.items() if setting not in fixed},
        )

    def job(self, task: str, settings: Mapping[str, Any], *, seed: int) -> Job:
        """Return the job of a run."""
        options = {name: value for name, value in self.task_options.items() if "." not in name}
        for name, value in self.task_options.items():
            if name.startswith(f"{task}."):
                options[name.removeprefix(f"{task}.")] = value
        shared = {
            "task": task,
            "task_options": options,
            "data": self.data,
            "workers": self.workers,
            "seed": seed,
            "epochs": None if self.steps else self.epochs.get(task),
            "steps": self.steps,
            "batch_size": self.batch_size,
            "schedule": self.schedule,
            "device": self.device,
        }
        return Job.from_json({**settings, **shared})


# The file of finished runs.
_JOURNAL = "runs.jsonl"

# Fields of a job that all contenders share.
_SHARED = ("task", "task_options", "data", "workers", "seed", "epochs", "steps", "batch_size", "schedule", "device")


# Fields of a job that a file of tuned values records.
_TERMS = ("task_options", "data", "epochs", "steps", "batch_size", "schedule", "workers")


@dataclass(frozen=True, kw_only=True)
class TaskComparison:
    """The result of a comparison on one task.

    Attributes:
        task: The task.
        results: For each contender the results of its runs, one per seed.
        rows: For each contender a row of the table.
        shares: What each contender needs beside the reference contender; empty without that.
        known: The tuned values, from before or from this comparison's search.
        job: The job of the first run, for the fields that all runs share.
    """

    task: tasks.Task
    results: Mapping[str, list[Result]]
    rows: list[Row]
    shares: Mapping[str, Share]
    known: Tuned | None
    job: Job

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values; infinite numbers become null."""
        values = {
            "task": self.task.name,
            "metric": asdict(self.task.metric),
            "shared": {name: value for name, value in self.job.to_json().items() if name in _SHARED and name != "seed"},
            "first_seed": self.job.seed,
            "shares": {name: asdict(share) for name, share in self.shares.items()},
            "rows": [asdict(row) for row in self.rows],
            "runs": {name: [result.to_json() for result in results] for name, results in self.results.items()},
        }
        plain: dict[str, Any] = _finite(values)
        return plain


def compare(comparison: Comparison, out: Path, report_progress: ReportProgress) -> list[TaskComparison]:
    """Run a comparison and return an outcome for each task.

    Finished runs are stored in `out`, and reused if the same comparison runs again. A search writes its tuned values
    to `out`/tuned.

    Raises:
        ValueError: `out` holds other files, or another process uses it.
        FileError: A line of its journal is damaged.
        StoppedError: A signal ended it.
        RankError: A run failed.
    """
    with claimed(out, "out", marker=_JOURNAL):
        runner = _Runner(Journal(out / _JOURNAL), comparison, report_progress)
        return [_compare_task(comparison, task, runner, out / "tuned") for task in comparison.task_names]


class _Runner:
    """Runs jobs, or finds their results in the journal."""

    def __init__(self, journal: Journal, comparison: Comparison, report_progress: ReportProgress) -> None:
        self._journal, self._report = journal, report_progress
        self._total, self._done = comparison.runs, 0

    def run(self, job: Job, description: str) -> Result:
        job = job.resolved()
        result = self._journal.find(job)
        known, description = result is not None, f"{job.task}: {description}"
        if result is None:
            self._report(description, self._done, self._total, True)
            result = train(job, Output(), own_process=True)
            if result.status == "stopped":
                raise StoppedError("a rank was stopped")
            self._journal.add(job, result)
        self._done += 1
        self._report(description, self._done, self._total, known)
        return result


def _compare_task(comparison: Comparison, task_name: str, runner: _Runner, out: Path) -> TaskComparison:
    known = tuned.read(task_name, comparison.tuned)
    if comparison.trials:
        known = _search(comparison, task_name, runner, known)
        tuned.write(known, out)
    settings = {name: comparison.contender(name, known).settings for name in comparison.optimizers}
    results: dict[str, list[Result]] = {name: [] for name in comparison.optimizers}
    for seed in comparison.seed_range:  # in turn, so that disturbances of the machine affect all contenders
        for name in comparison.optimizers:
            job = comparison.job(task_name, settings[name], seed=seed)
            results[name].append(runner.run(job, f"{name}, seed {seed}"))
    shared = comparison.job(task_name, settings[comparison.optimizers[0]], seed=comparison.first_seed).resolved()
    task = shared.build_task()
    rows = [summarise(name, settings[name], results[name]) for name in comparison.optimizers]
    found = shares(results, task.metric)
    return TaskComparison(task=task, results=results, rows=rows, shares=found, known=known, job=shared)


def _search(comparison: Comparison, task: str, runner: _Runner, known: Tuned | None) -> Tuned:
    """Search the settings of every contender and return the updated tuned values."""
    known = known or Tuned(task=task, settings={})
    for name in comparison.optimizers:
        contender = comparison.contender(name, known)
        found = search.search(
            contender,
            comparison.trials,
            objective=comparison.objective,
            higher_is_better=comparison.job(task, contender.settings, seed=0).build_task().metric.better == "higher",
            job=partial(_trial, comparison, task, contender),
            execute=partial(runner.run, description=f"searching {name}"),
        )
        job = _trial(comparison, task, contender, {}).resolved().to_json()
        entry = {"trials": comparison.trials, "objective": comparison.objective, "seed": search.SEED}
        entry |= {name: job[name] for name in _TERMS}
        known = replace(
            known,
            settings={**known.settings, name: {**contender.settings, **found.best}},
            search={**known.search, name: {**entry, "log": found.log}},
            environment=environment.describe(),
        )
    return known


def _trial(comparison: Comparison, task: str, contender: Contender, point: Mapping[str, float]) -> Job:
    return comparison.job(task, {**contender.settings, **point}, seed=search.SEED)


def _finite(value: Any) -> Any:
    """Replace infinite numbers and NaN, which JSON lacks, by None."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value
