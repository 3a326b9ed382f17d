"""Running a job: folder, ranks, display, checkpoints."""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from natgrad.errors import ArgumentError, NatgradWarning, require

from . import checkpoint
from .build import rehearse
from .display import display
from .job import Job
from .launch import INTERRUPTED, check_interface, launch
from .loop import Observer, Training
from .result import Point, Result, append_point, replace_text, write_points
from .world import World, join, launched, stop_requests

CONFIGURATION = "config.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class Output:
    """The output of a run.

    Attributes:
        folder: The folder of configuration, metrics and checkpoints; None: no files.
        save_seconds: The least time between two checkpoints; the first comes within five minutes.
        show: Whether to show the run on the terminal.

    Raises:
        ValueError: if `save_seconds` is below 0.
    """

    folder: Path | None = None
    save_seconds: float = 30.0
    show: bool = False

    def __post_init__(self) -> None:
        """Check the number."""
        require(self.save_seconds >= 0, "save_seconds", self.save_seconds, "a number >= 0")


def train(
    job: Job, output: Output, *, resume: bool = False, own_process: bool = False, interface: str | None = None
) -> Result:
    """Train a job on its ranks and return the result.

    Args:
        job: The job.
        output: The output.
        resume: Continue from the newest checkpoint in the folder.
        own_process: Start a new process for a single rank, too.
        interface: The network interface of the connections between ranks of this machine; None: the loopback interface,
            which other machines cannot reach. Ranks of an outer launcher use what that launcher sets.

    Raises:
        ValueError: A setting is not allowed, the job does not fit the task's data, or the folder holds another run. No
            file has changed.
        RankError: A rank failed; the newest checkpoint is kept.
        StoppedError: A signal stopped the ranks started here, after they saved a checkpoint.
    """
    if interface is not None:
        check_interface(interface)
    job = job.resolved()
    rehearse(job)
    if output.folder is not None and int(os.environ.get("RANK", 0)) == 0:
        _prepare(output.folder, job, resume=resume)
    return launch(_run_rank, job, output, resume, workers=job.workers, own_process=own_process, interface=interface)


def read_job(folder: Path) -> Job:
    """Return the job of the run in a folder.

    Raises:
        ValueError: The folder holds no run.
    """
    try:
        values = json.loads((folder / CONFIGURATION).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ArgumentError("resume", str(folder), f"a folder with the {CONFIGURATION} of a run") from error
    return Job.from_json(values)


def saved_step(folder: Path) -> int | None:
    """Return the step of a run's newest checkpoint that is not damaged, or None if there is none."""
    path = checkpoint.latest(folder / CHECKPOINTS)
    return checkpoint.step_of(path) if path else None


def _prepare(folder: Path, job: Job, *, resume: bool) -> None:
    if resume:
        done = saved_step(folder)
        if done is None:
            raise ArgumentError("resume", str(folder), "a folder with a complete checkpoint")
        length = "steps" if job.steps else "epochs"
        enough = f"enough for the {done} steps that the run has done"
        require(job.total_steps >= done, length, getattr(job, length), enough)
        alike = job.averaging == "none" or job.workers == read_job(folder).workers
        allowed = f"{read_job(folder).workers}, as before: with averaging each rank has a state of its own"
        require(alike, "workers", job.workers, allowed)
    else:
        taken = (folder / CONFIGURATION).exists()
        require(not taken, "out", str(folder), "a folder without a run (resume that one, or choose another folder)")
        (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    checkpoint.clean(folder / CHECKPOINTS)
    replace_text(folder / CONFIGURATION, json.dumps(job.to_json(), indent=2) + "\n")


def _run_rank(job: Job, output: Output, resume: bool) -> Result:
    """Run one rank."""
    if launched():
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with stop_requests() as stop, join(job.device) as world, display(output.show and world.is_leader) as view:
        result = _train(job, world, output, view, stop, resume=resume)
    if result.status == "stopped" and multiprocessing.parent_process() is not None:
        raise SystemExit(INTERRUPTED)  # after a signal the launcher ignores the values of its ranks
    return result


def _train(job: Job, world: World, output: Output, view: Observer, stop: Callable[[], bool], *, resume: bool) -> Result:
    folder = world.agree(output.folder)
    training = Training(
        job,
        world,
        observer=_Recorder(folder, view),
        stop=stop,
        save=partial(_save, folder, world) if folder else None,
        save_seconds=output.save_seconds,
    )
    if resume and folder:
        _restore(training, folder, world)
    return training.run()


def _save(folder: Path, world: World, training: Training) -> None:
    """Write a checkpoint; warn if that fails."""
    try:
        checkpoint.save(folder / CHECKPOINTS, training.position.step, training.state_dict())
    except checkpoint.CheckpointError as error:
        if world.is_leader:
            older = saved_step(folder)
            stays = "without a checkpoint" if older is None else f"and the checkpoint of step {older} stays"
            warnings.warn(f"{error}; the run goes on, {stays}", NatgradWarning, stacklevel=2)


def _restore(training: Training, folder: Path, world: World) -> None:
    """Load the newest checkpoint that is not damaged, and remove later points from the metrics."""
    training.load_state_dict(checkpoint.load_latest(folder / CHECKPOINTS))
    if world.is_leader:
        write_points(folder / METRICS, training.points)


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
            warnings.warn(f"{path} could not be written: {error}; tried again later", NatgradWarning, stacklevel=2)
