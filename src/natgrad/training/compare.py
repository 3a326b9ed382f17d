"""The same tasks and seeds under several optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from natgrad import tasks
from natgrad.errors import require

from . import contenders, environment, search, tuned
from .build import rehearse
from .contenders import REFERENCE, Contender
from .job import Device, Job
from .journal import Journal
from .launch import StoppedError
from .optimizers import ScheduleName
from .result import Result
from .run import Output, train
from .summary import Quantity, Row, summarise, targets
from .tuned import Tuned

# Says which run is under way, how many are done, of how many, and whether nothing was said of this one yet.
Tell = Callable[[str, int, int, bool], None]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared.

    Attributes:
        task_names: Tasks, one after the other.
        task_options: Options of every task.
        optimizers: Contenders.
        seeds: Runs a contender, each on a seed of its own.
        first_seed: The least of the seeds; the others follow it.
        workers: Ranks a run.
        epochs: Length of a run by task; a task left out takes its own.
        steps: Length of a run in place of `epochs`.
        batch_size: None takes the task's own.
        schedule: Of the learning rate, for all.
        trials: Runs that a search may spend on each contender beforehand; 0 starts from tuned values.
        objective: What a search goes by.
        overrides: For each contender fields of its job that neither search nor tuned values change.
        tuned: Folder of tuned values.
        device: Where to train.
    """

    task_names: tuple[str, ...]
    task_options: Mapping[str, Any] = field(default_factory=dict)
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
        require(self.task_names, "task", self.task_names, f"one of {', '.join(tasks.names())}")
        for name, given in (("task", self.task_names), ("optimizers", self.optimizers)):
            require(len(set(given)) == len(given), name, list(given), "each given once")
        require(self.optimizers, "optimizers", self.optimizers, f"some of {', '.join(contenders.NAMES)}")
        require(self.seeds >= 1, "seeds", self.seeds, "at least 1")
        require(self.first_seed >= 0, "first_seed", self.first_seed, "at least 0")
        apart = search.SEED not in self.seed_range
        require(apart, "first_seed", self.first_seed, f"such that no seed is {search.SEED}, which searches use")
        require(self.trials >= 0, "search", self.trials, "a number of trials, or 0 for none")
        search.check_objective(self.objective)
        for name, settings in self.overrides.items():
            require(name in self.optimizers, "override", name, f"one of {', '.join(self.optimizers)}")
            for each in settings:
                allowed = [one.name for one in fields(Job) if one.name not in _SHARED]
                require(each in allowed, f"override {name}", each, f"one of {', '.join(allowed)}")
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
        """How many runs the comparison takes."""
        return len(self.task_names) * len(self.optimizers) * (self.trials + self.seeds)

    def contender(self, name: str, known: Tuned | None) -> Contender:
        """Return a contender with the best settings known, and what the user fixed fixed."""
        contender, fixed = contenders.get(name), self.overrides.get(name, {})
        best = known.settings.get(name, {}) if known else {}
        return replace(
            contender,
            settings={**contender.settings, **best, **fixed},
            ranges={each: limits for each, limits in contender.ranges.items() if each not in fixed},
        )

    def job(self, task: str, settings: Mapping[str, Any], *, seed: int) -> Job:
        """Return one run's job."""
        return Job(
            task=task,
            task_options=self.task_options,
            workers=self.workers,
            seed=seed,
            epochs=None if self.steps else self.epochs.get(task),
            steps=self.steps,
            batch_size=self.batch_size,
            schedule=self.schedule,
            device=self.device,
            **settings,
        )


# Fields of a job that all contenders share.
_SHARED = ("task", "task_options", "workers", "seed", "epochs", "steps", "batch_size", "schedule", "device")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One task's comparison.

    Attributes:
        task: The task.
        results: For each contender its runs, one a seed.
        rows: For each contender its line in a table.
        target: Loss and metric to reach; empty without the reference contender.
        target_origin: Where the target comes from.
        known: What was tuned before, or by this comparison's search.
        job: What all runs share: the first run's job.
    """

    task: tasks.Task
    results: Mapping[str, list[Result]]
    rows: list[Row]
    target: Mapping[Quantity, float]
    target_origin: str
    known: Tuned | None
    job: Job

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values; what was never reached is null."""
        values = {
            "task": self.task.name,
            "metric": asdict(self.task.metric),
            "shared": {name: value for name, value in self.job.to_json().items() if name in _SHARED and name != "seed"},
            "first_seed": self.job.seed,
            "target": dict(self.target),
            "target_origin": self.target_origin,
            "rows": [asdict(row) for row in self.rows],
            "runs": {name: [each.to_json() for each in results] for name, results in self.results.items()},
        }
        plain: dict[str, Any] = _finite(values)
        return plain


def compare(comparison: Comparison, out: Path, tell: Tell) -> list[Outcome]:
    """Run a comparison and return an outcome for each task.

    Every finished run is kept in `out`, where the same comparison finds it again; a search writes its tuned values to
    `out`/tuned.

    Raises:
        StoppedError: A signal ended it.
        RankError: A run failed.
    """
    runner = _Runner(Journal(out / "runs.jsonl"), comparison, tell)
    return [_compare_task(comparison, task, runner, out / "tuned") for task in comparison.task_names]


class _Runner:
    """Does runs, or finds them done."""

    def __init__(self, journal: Journal, comparison: Comparison, tell: Tell) -> None:
        self._journal, self._tell, self._total, self._done = journal, tell, comparison.runs, 0

    def run(self, job: Job, what: str) -> Result:
        job = job.resolved()
        result = self._journal.find(job)
        known, what = result is not None, f"{job.task}: {what}"
        if result is None:
            self._tell(what, self._done, self._total, True)
            result = train(job, Output(), own_process=True)
            if result.status == "stopped":
                raise StoppedError("a rank was stopped")
            self._journal.add(job, result)
        self._done += 1
        self._tell(what, self._done, self._total, known)
        return result


def _compare_task(comparison: Comparison, name: str, runner: _Runner, out: Path) -> Outcome:
    known = tuned.read(name, comparison.tuned)
    if comparison.trials:
        known = _search(comparison, name, runner, known)
        tuned.write(known, out)
    settings = {each: comparison.contender(each, known).settings for each in comparison.optimizers}
    results: dict[str, list[Result]] = {each: [] for each in comparison.optimizers}
    for seed in comparison.seed_range:  # contenders take turns, so that what disturbs the machine disturbs all
        for each in comparison.optimizers:
            job = comparison.job(name, settings[each], seed=seed)
            results[each].append(runner.run(job, f"{each}, seed {seed}"))
    shared = comparison.job(name, settings[comparison.optimizers[0]], seed=comparison.first_seed).resolved()
    terms = _terms(shared)
    if known and known.target and known.target_terms == terms:
        target = known.target
        origin = f"tuned {REFERENCE}'s final values, set once and written down"
    else:
        target = targets(results)
        origin = f"{REFERENCE}'s median final values in this comparison" if target else "none"
        if comparison.trials and known and target:
            known = replace(known, target=target, target_terms=terms)
            tuned.write(known, out)
    task = shared.build_task()
    rows = [summarise(each, settings[each], results[each], task.metric, target) for each in comparison.optimizers]
    return Outcome(task=task, results=results, rows=rows, target=target, target_origin=origin, known=known, job=shared)


def _search(comparison: Comparison, name: str, runner: _Runner, known: Tuned | None) -> Tuned:
    """Search every contender anew and return what is now known of the task."""
    known = known or Tuned(task=name, settings={})
    for each in comparison.optimizers:
        contender = comparison.contender(each, known)
        found = search.search(
            contender,
            comparison.trials,
            objective=comparison.objective,
            higher_is_better=comparison.job(name, contender.settings, seed=0).build_task().metric.better == "higher",
            job=partial(_trial, comparison, name, contender),
            execute=partial(runner.run, what=f"searching {each}"),
        )
        terms = {**_terms(_trial(comparison, name, contender, {}).resolved()), "workers": comparison.workers}
        entry = {"trials": comparison.trials, "objective": comparison.objective, "seed": search.SEED, **terms}
        known = replace(
            known,
            settings={**known.settings, each: {**contender.settings, **found.best}},
            search={**known.search, each: {**entry, "log": found.log}},
            environment=environment.describe(),
        )
        if each == REFERENCE:  # what it reaches is to be measured anew
            known = replace(known, target={}, target_terms={})
    return known


def _trial(comparison: Comparison, task: str, contender: Contender, point: Mapping[str, float]) -> Job:
    return comparison.job(task, {**contender.settings, **point}, seed=search.SEED)


def _terms(job: Job) -> dict[str, Any]:
    """Return what a target depends on beside the reference contender's settings."""
    return {
        name: value
        for name, value in job.to_json().items()
        if name in ("task_options", "epochs", "steps", "batch_size", "schedule")
    }


def _finite(value: Any) -> Any:
    """Replace numbers that JSON lacks by None."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
