"""Running a job: folder, ranks, display, checkpoints."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from natgrad.errors import ArgumentError, require, warn

from . import checkpoint
from .build import rehearse
from .curvatures import check_layers
from .display import display
from .files import FileError, Lock, claimed, read_json, replace_text
from .job import CHANGEABLE, Job
from .launch import INTERRUPTED, launch
from .loop import Observer, Training
from .result import Point, Result, append_point, write_points
from .start import load_weights
from .world import World, join, launched, stop_requests

CONFIGURATION = "config.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"

# The key of a run's identity in its configuration.
_IDENTITY = "run"


@dataclass(frozen=True, kw_only=True)
class Output:
    """The output of a run.

    Attributes:
        folder: The folder of configuration, metrics and checkpoints, new or empty unless the run is resumed; None: no
            files.
        save_seconds: The least time between two checkpoints; the first comes after three minutes at the latest.
        show: Whether to show the run on the terminal.
        title: A line that is printed before the first step, when no setting can be refused any more.

    Raises:
        ValueError: if `save_seconds` is below 0.
    """

    folder: Path | None = None
    save_seconds: float = 30.0
    show: bool = False
    title: str = ""

    def __post_init__(self) -> None:
        require(self.save_seconds >= 0, "save_seconds", self.save_seconds, "a number >= 0")


def train(job: Job, output: Output, *, resume: bool = False, own_process: bool = False) -> Result:
    """Train a job on its ranks and return the result.

    A run that was killed before its first checkpoint starts again from the beginning, whether it is resumed or started
    with the same job. Under ``torchrun --max-restarts`` above 0, which starts the same command again, a run in the
    folder is resumed.

    Args:
        job: The job.
        output: The output.
        resume: Continue from the newest checkpoint in the folder.
        own_process: Start a new process for a single rank, too.

    Raises:
        ValueError: A setting is not allowed, the job does not fit the task's data, the folder holds another run or
            other files, or another process uses it. No file has changed.
        FileError: The folder's configuration is damaged, or was changed by hand.
        CheckpointError: No checkpoint can be loaded on these ranks. Configuration and checkpoints are unchanged.
        RankError: A rank failed; the newest checkpoint is kept.
        StoppedError: A signal stopped the ranks started here, after they saved a checkpoint.
    """
    is_leader = int(os.environ.get("RANK", 0)) == 0
    resume = resume or (output.folder is not None and _may_be_restarted() and (output.folder / CONFIGURATION).exists())
    with _newest_named(output.folder if resume else None):
        job = job.resolved()
        rehearse(job)
    if is_leader and not resume:  # find what does not fit before the run
        task = job.build_task()
        model = task.model()
        check_layers(job.layers, model)
        if job.start_from is not None:
            load_weights(model, job.start_from, task.new_parameters, task.vocabulary_digest())
    claim = (
        _claimed(output, job, resume=resume) if output.folder is not None and is_leader else nullcontext((None, None))
    )
    with claim as (place, lock):
        return launch(_run_rank, job, output, place, lock, workers=job.workers, own_process=own_process)


def read_job(folder: Path) -> Job:
    """Return the job of the run in a folder.

    Raises:
        ValueError: The folder holds no run.
        FileError: The configuration is damaged.
    """
    return _read_configuration(folder)[0]


def saved_step(folder: Path) -> int | None:
    """Return the step of a run's newest checkpoint that is not damaged, or None if there is none.

    Raises:
        ValueError: The folder holds no run.
        FileError: The configuration is damaged.
    """
    path = _newest(folder)
    return checkpoint.step_of(path) if path else None


def _newest(folder: Path) -> Path | None:
    """Return a run's newest checkpoint that is not damaged, or None if there is none."""
    return checkpoint.latest(folder / CHECKPOINTS, _read_configuration(folder)[1])


@contextmanager
def _newest_named(folder: Path | None) -> Iterator[None]:
    """Name the newest checkpoint in a folder in errors of arguments, which may be those of another number of ranks."""
    try:
        yield
    except ArgumentError as error:
        path = _newest(folder) if folder is not None else None
        if path is None:
            raise
        continues = f"{error.allowed}; start again with an allowed value to continue from {path}"
        raise ArgumentError(error.name, error.value, continues) from error


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The folder of a run.

    Attributes:
        folder: The folder.
        run: The identity of the run; empty for a run of an earlier version.
        has_checkpoint: Whether the run goes on from a checkpoint.
    """

    folder: Path
    run: str
    has_checkpoint: bool


def _read_configuration(folder: Path) -> tuple[Job, str]:
    """Return the job and the identity of the run in a folder."""
    path = folder / CONFIGURATION
    try:
        values = read_json(path)
    except OSError as error:
        raise ArgumentError("resume", str(folder), f"a folder with the {CONFIGURATION} of a run") from error
    run = values.pop(_IDENTITY, "")
    if not isinstance(run, str) or re.fullmatch("([0-9a-f]{32})?", run) is None:
        raise FileError(f"{path}: {_IDENTITY} is {run!r}, which is not the identity of a run")
    try:
        return Job.from_json(values), run
    except ArgumentError as error:
        raise FileError(f"{path}{_line_of(error.name, path)}: {error}") from error


def _write_configuration(folder: Path, job: Job, run: str) -> None:
    """Write the configuration of a run."""
    identity = {_IDENTITY: run} if run else {}
    replace_text(folder / CONFIGURATION, json.dumps({**job.to_json(), **identity}, indent=2) + "\n")


def _line_of(field: str, path: Path) -> str:
    """Return the line of a field in a configuration, as text for a message; empty if it has none of its own."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return next((f", line {number}" for number, line in lines if line.strip().startswith(f'"{field}":')), "")


@contextmanager
def _claimed(output: Output, job: Job, *, resume: bool) -> Iterator[tuple[_Place, Lock]]:
    """Prepare the folder of a run, and keep other processes out of it.

    Raises:
        ValueError: The folder holds another run or other files, or another process uses it. No file has changed.
        FileError: The configuration is damaged.
    """
    folder = output.folder
    assert folder is not None
    _check(folder, job, resume=resume)
    with claimed(folder, "resume" if resume else "out", marker=CONFIGURATION) as lock:
        run = _check(folder, job, resume=resume)
        is_new, run = run is None, uuid.uuid4().hex if run is None else run
        done = None if is_new else _done(folder, run, job, resume=resume)
        for path in {*checkpoint.complete(folder / CHECKPOINTS)} - {*checkpoint.complete(folder / CHECKPOINTS, run)}:
            warn(f"{path} is not a checkpoint of this run, and is left as it is", "foreign-checkpoint")
        checkpoint.clean(folder / CHECKPOINTS, run)
        if done is None:
            (folder / METRICS).unlink(missing_ok=True)
            _write_configuration(folder, job, run)
        (folder / CHECKPOINTS).mkdir(exist_ok=True)
        if done is None and not is_new and output.show:
            print(f"{folder} holds no checkpoint yet: the run starts afresh", flush=True)
        yield _Place(folder=folder, run=run, has_checkpoint=done is not None), lock


def _check(folder: Path, job: Job, *, resume: bool) -> str | None:
    """Check that a folder holds the run of a job, if any, and return the run's identity."""
    if resume:
        stored, run = _read_configuration(folder)
        # It may have been changed by hand, and its data may have moved.
        stored = replace(stored, data=job.data).resolved()
        for name in (each.name for each in fields(Job)):
            value, before = getattr(job, name), getattr(stored, name)
            allowed = f"{before!r}, as in {folder / CONFIGURATION}"
            require(name in CHANGEABLE or value == before, name, value, allowed)
        if job.averaging != "none":
            _check_ranks(folder, job, stored)
        return run
    if not (folder / CONFIGURATION).exists():
        return None
    free = "a folder without a run (resume that one, or choose another folder)"
    try:
        stored, run = _read_configuration(folder)
    except (ValueError, FileError) as error:
        raise ArgumentError("out", str(folder), free) from error
    require(stored == job and not checkpoint.complete(folder / CHECKPOINTS, run), "out", str(folder), free)
    return run


def _check_ranks(folder: Path, job: Job, stored: Job) -> None:
    """Check that the nodes of a job with averaging have as many ranks as in the checkpoints of a run.

    The number of nodes may differ if the checkpoint was saved when they were equal: see `Training.fits`.
    """
    size = stored.workers // (stored.nodes or 1)
    place = f"the checkpoints in {folder / CHECKPOINTS} have a state for each rank"
    require(job.workers == size * (job.nodes or 1), "workers", job.workers, f"{size} for each node, as before: {place}")


def _done(folder: Path, run: str, job: Job, *, resume: bool) -> int | None:
    """Return the steps that a run has done, or None before its first checkpoint."""
    path = checkpoint.latest(folder / CHECKPOINTS, run)
    if path is None:
        damaged = checkpoint.complete(folder / CHECKPOINTS, run)
        name = "resume" if resume else "out"
        require(not damaged, name, str(folder), "a folder with a complete checkpoint; all of this one are damaged")
        return None
    done = checkpoint.step_of(path)
    length = "steps" if job.steps else "epochs"
    enough = f"enough for the {done} steps that the run has done"
    require(job.total_steps >= done, length, getattr(job, length), enough)
    return done


def _may_be_restarted() -> bool:
    """Return whether torch's elastic agent starts this command again after a failure or with other ranks."""
    return launched() and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0


def _run_rank(job: Job, output: Output, place: _Place | None, lock: Lock | None) -> Result:
    """Run one rank, which holds the lock until it ends, even if its launcher is killed."""
    if launched():
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with stop_requests() as stop, join(job.device) as world, display(output.show and world.is_leader) as view:
        result = _train(job, world, output, world.agree(place), view, stop)
    if result.status == "stopped" and multiprocessing.parent_process() is not None:
        raise SystemExit(INTERRUPTED)  # after a signal the launcher ignores the values of its ranks
    return result


def _train(
    job: Job, world: World, output: Output, place: _Place | None, view: Observer, stop: Callable[[], bool]
) -> Result:
    training = Training(
        job,
        world,
        observer=_Recorder(place.folder if place else None, view),
        stop=stop,
        save=partial(_save, place, world) if place else None,
        save_seconds=output.save_seconds,
        is_elastic=_may_be_restarted(),
        is_resumed=place is not None and place.has_checkpoint,
    )
    if world.is_leader and output.title:
        print(output.title, flush=True)
    if place and place.has_checkpoint:
        _restore(training, place, world)
    return training.run()


def _save(place: _Place, world: World, training: Training) -> None:
    """Write a checkpoint; warn if that fails."""
    try:
        checkpoint.save(place.folder / CHECKPOINTS, training.position.step, training.state_dict(), place.run)
    except checkpoint.CheckpointError as error:
        if world.is_leader:
            older = checkpoint.complete(place.folder / CHECKPOINTS, place.run)
            last = checkpoint.step_of(older[-1]) if older else None
            stays = "without a checkpoint" if last is None else f"and the checkpoint of step {last} stays"
            warn(f"{error}; the run goes on, {stays}", "unwritten-file")


def _restore(training: Training, place: _Place, world: World) -> None:
    """Load the newest checkpoint that is not damaged, and change the configuration and metrics accordingly."""
    checkpoint.load_latest(place.folder / CHECKPOINTS, place.run, partial(_load, training, place))
    if world.is_leader:
        _write_configuration(place.folder, training.job, place.run)
        write_points(place.folder / METRICS, training.points)


def _load(training: Training, place: _Place, path: Path, state: dict[str, Any]) -> None:
    """Load the state in a checkpoint."""
    try:
        training.check_job(state)
    except ArgumentError as error:
        configuration = place.folder / CONFIGURATION
        raise FileError(f"{configuration}{_line_of(error.name, configuration)}: {error}") from error
    if not training.fits(state):
        saved = json.loads(state["job"])
        ranks, nodes = saved["workers"], saved["nodes"]
        raise checkpoint.CheckpointError(
            f"checkpoint {path} was saved between two averages, when its {nodes} nodes differed: continue with {ranks} "
            f"ranks on {nodes} nodes, or remove this checkpoint to go on from the one before"
        )
    training.load_state_dict(state)


class _Recorder:
    """Passes progress on to the display, and writes points to a file in `folder`, if there is one."""

    def __init__(self, folder: Path | None, view: Observer) -> None:
        self._folder, self._view, self._missing = folder, view, False

    def step(self, training: Training, loss: float) -> None:
        self._view.step(training, loss)

    def point(self, training: Training, point: Point) -> None:
        self._view.point(training, point)
        if self._folder is None:
            return
        path = self._folder / METRICS
        try:
            if self._missing:
                write_points(path, training.points)
            else:
                append_point(path, point)
            self._missing = False
        except OSError as error:
            self._missing = True
            warn(f"{path} could not be written: {error}; tried again later", "unwritten-file")
