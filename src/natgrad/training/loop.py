"""The training loop of one rank: batches, steps, evaluations, checkpoints."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from math import isfinite
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing import get_sharing_strategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from natgrad.capture.counts import Count
from natgrad.errors import DivergedError, require
from natgrad.tasks.applications import Application
from natgrad.tasks.base import DataError, Samples
from natgrad.tasks.batches import Batch, size, split, tensors, to

from .additions import Additions
from .averaging import describe, node_mesh
from .build import build_averager, build_optimizer, build_scheduler, seconds_spent
from .job import CHANGEABLE, Job, current
from .result import Point, Result, Status
from .schedules import Plateau
from .start import load_weights
from .world import StepMessages, StepSummary, World

_DESCRIBED = 5  # samples whose targets tell a data set from others

# The time without a checkpoint after which a pass is interrupted to save one. It leaves two minutes to the step or
# evaluation under way, the step after it and writing, so that there is a first checkpoint after five minutes.
_LONGEST_WITHOUT_CHECKPOINT = 180.0


class Observer(Protocol):
    """Receives the progress of a run, on rank 0."""

    def step(self, training: Training, loss: float) -> None:
        """Receive the mean loss of a step."""

    def point(self, training: Training, point: Point) -> None:
        """Receive an evaluation."""


@dataclass(kw_only=True)
class RunProgress:
    """The progress of a run.

    Attributes:
        step: Completed optimizer steps.
        epoch: Completed passes over the training set.
        batch: Completed steps of the current pass.
        seconds: Training time so far.
        loss_sum: Sum of the losses since the last point, each times its number of samples.
        samples: Number of samples in `loss_sum`.
        point_seconds: `seconds` at the last point.
        preconditioner_seconds: The part of `seconds` that earlier processes of this run spent in the preconditioner.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    samples: int = 0
    point_seconds: float = 0.0
    preconditioner_seconds: float = 0.0


class Training:
    """The training of a job on one rank.

    Args:
        job: A resolved job.
        world: The ranks.
        observer: Receives the progress of the run.
        stop: Called after each step; returns whether this rank should stop.
        save: Called by every rank when a checkpoint is due; None for no checkpoints.
        save_seconds: The least time between two checkpoints; the end of the run and a stop always save. The first one
            is saved after three minutes at the latest, also within a pass; later ones within a pass if there has been
            none for `save_seconds` and three minutes.
        is_elastic: Whether the run may be continued with another number of nodes: DASO then synchronizes them before
            each checkpoint, so that any number of nodes can load it.
        is_resumed: Whether a state is loaded afterwards, so that the weights of `Job.start_from` are not needed.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        *,
        observer: Observer,
        stop: Callable[[], bool],
        save: Callable[[Training], None] | None = None,
        save_seconds: float = 30.0,
        is_elastic: bool = False,
        is_resumed: bool = False,
    ) -> None:
        self.job, self.world, self.task = job, world, job.build_task()
        self.position, self.points = RunProgress(), list[Point]()
        self._observer, self._stop, self._save, self._save_seconds = observer, stop, save, save_seconds
        self._is_elastic = is_elastic
        self._saved_at, self._unsaved_seconds = perf_counter(), _LONGEST_WITHOUT_CHECKPOINT

        self._train, self._test = self.task.datasets()
        self._samples = self._describe_samples()
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            self._train,  # type: ignore[arg-type]  # any sequence will do
            num_replicas=world.size,
            rank=world.rank,
            shuffle=True,
            seed=job.seed,
        )
        self._batches = BatchSampler(self._sampler, job.global_batch // world.size, drop_last=False)
        self.total_steps = job.total_steps

        torch.manual_seed(job.seed)
        self.model = self.task.model().to(world.device)
        if job.start_from is not None and not is_resumed:
            load_weights(self.model, job.start_from, self.task.new_parameters, self.task.vocabulary_digest())
        mesh = node_mesh(world.device, job.nodes or 1, world.size) if job.averaging != "none" else None
        group = mesh.get_group("local") if mesh is not None else None
        if self.task.sync_norm:
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model, group)
        self._replica = DistributedDataParallel(self.model, process_group=group) if world.size > 1 else self.model
        self.optimizer, self.preconditioner = build_optimizer(
            job, self.task, self._replica, layers=job.layers or self.task.curvature_layers
        )
        explained = self.preconditioner.explain().rows if self.preconditioner is not None else ()
        self._covered = [row.parameter.rpartition(".")[0] for row in explained if row.curvature]  # names of layers
        self.scheduler = build_scheduler(job, self.optimizer)
        self._additions = Additions(job, self.model, world.rank)
        self.averager = build_averager(
            job, self._replica, self.optimizer, self.preconditioner, mesh, len(self._batches)
        )
        # From here on random numbers, such as those of dropout, differ between ranks.
        torch.manual_seed((job.seed << 16) + world.rank)

    def run(self) -> Result:
        """Train until the end, a stop or a divergence."""
        try:
            status = self._run_passes()
        except DivergedError:  # when nodes are synchronized for a checkpoint
            status = "diverged"
        return Result(
            status=status,
            points=self.points,
            preconditioner=_plain(self.preconditioner.metrics()) if self.preconditioner else {},
            traffic=dict(self.preconditioner.traffic()) if self.preconditioner else {},
        )

    def _run_passes(self) -> Status:
        """Train until the end, a stop or a divergence, and save the last checkpoint."""
        status: Status = "finished"
        # A run that was stopped within a pass and has no steps left still lacks the evaluation of its end.
        while status == "finished" and not self.has_reached_target and self._lacks_steps_or_evaluation():
            status = self._pass()
        if status == "stopped" and (self.position.step == self.total_steps or self.has_reached_target):
            status = "finished"
        if self._save is not None and status != "diverged":
            self._save_checkpoint()
        return status

    def _lacks_steps_or_evaluation(self) -> bool:
        return self.position.step < self.total_steps or self.position.samples > 0

    @property
    def has_reached_target(self) -> bool:
        """Whether the last evaluation reached the job's target."""
        target = self.job.target
        return bool(self.points) and target is not None and self.task.metric.reaches(self.points[-1].metric, target)

    def share(self) -> float:
        """Return the preconditioner's share of the training time."""
        return self._preconditioner_seconds() / max(self.position.seconds, 1e-9)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for resuming. Collective."""
        own: dict[str, Any] = {"cpu": torch.get_rng_state(), "recipe": self._additions.state_dict()}
        if self.world.device.type == "cuda":
            own["cuda"] = torch.cuda.get_rng_state()
        position = RunProgress(**{**asdict(self.position), "preconditioner_seconds": self._preconditioner_seconds()})
        trained: dict[str, Any] = {}
        if self.averager is not None:
            trained["averager"] = self.averager.state_dict()
        else:
            self.world.share_buffers(self.model.buffers())
        trained |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.preconditioner is not None:
            trained["preconditioner"] = self.preconditioner.state_dict(gather=True)
        shared = {
            "job": json.dumps(self.job.to_json()),
            "samples": json.dumps(self._samples),
            "scheduler": self.scheduler.state_dict(),
            # Times differ between ranks, but a checkpoint has one copy of shared state.
            "progress": self.world.agree(json.dumps([asdict(position), [asdict(point) for point in self.points]])),
        }
        if self.averager is not None:  # nodes have different states
            return {**shared, "ranks": {str(self.world.rank): {**own, **trained}}}
        return {**shared, **trained, "ranks": {str(self.world.rank): own}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`, which `check_job` has accepted."""
        own = state.get("ranks", {}).get(str(self.world.rank))
        trained = state if self.averager is None else self._own_or_first(own)
        self.model.load_state_dict(trained["model"])
        optimizer = trained["optimizer"]
        # Earlier versions saved integer keys as strings.
        optimizer["state"] = {int(index): state for index, state in optimizer["state"].items()}
        self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(state["scheduler"])
        if self.preconditioner is not None:
            self.preconditioner.load_state_dict(trained["preconditioner"])
        if self.averager is not None:
            self.averager.load_state_dict(trained["averager"])
        position, points = json.loads(state["progress"])
        self.position, self.points = RunProgress(**position), [Point(**point) for point in points]
        self._additions.load_state_dict(self.position.step, own and own.get("recipe"))
        if own is not None:  # an additional rank keeps its new random state
            torch.set_rng_state(own["cpu"])
            if self.world.device.type == "cuda" and "cuda" in own:
                torch.cuda.set_rng_state(own["cuda"])

    def fits(self, state: dict[str, Any]) -> bool:
        """Return whether the ranks of this run can load a state. Collective.

        With averaging each rank has a state of its own. Other ranks can load it if all nodes were equal.
        """
        saved, here = json.loads(state.get("job", "{}")), self.job.to_json()
        if self.averager is None or all(saved.get(name, here[name]) == here[name] for name in ("workers", "nodes")):
            return True
        own = state.get("ranks", {}).get(str(self.world.rank))
        differs = own is not None and not own.get("averager", {}).get("equal", False)
        return not self.world.maxima(differs)[0]

    def _own_or_first(self, own: Any) -> Any:
        """Return this rank's state, or that of rank 0 on a rank of an additional node. Collective."""
        is_missing = self.world.maxima(own is None)[0] > 0
        first = self.world.agree(own) if is_missing else None
        return first if own is None else own

    def check_job(self, state: dict[str, Any]) -> None:
        """Check that a state from `state_dict` is one of this job.

        Raises:
            ValueError: It is the state of another job.
        """
        saved = json.loads(state.get("job", "{}"))  # earlier versions did not save it
        saved = saved and current(saved)
        for name, value in self.job.to_json().items():
            same = name in CHANGEABLE or name not in saved or value == saved[name]
            require(same, name, value, f"{saved.get(name)!r}, as in the checkpoint")
        samples = json.loads(state.get("samples", "null"))
        allowed = f"the data of the checkpoint ({samples}), and these are others ({self._samples})"
        require(samples in (None, self._samples), "data", self.job.data, allowed)

    def _describe_samples(self) -> dict[str, Any] | None:
        """Return what tells the samples of a data set from others. None: the task's are embedded in every case."""
        if not isinstance(self.task, Application):
            return None
        places = torch.linspace(0, len(self._train) - 1, _DESCRIBED).long().tolist()
        _, targets = self._train[places]
        content = hashlib.sha256()
        for tensor in tensors(targets):
            content.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
            content.update(tensor.contiguous().numpy().tobytes())
        described = {"training": len(self._train), "test": len(self._test), "targets": content.hexdigest()[:16]}
        vocabulary = self.task.vocabulary_digest()
        return described if vocabulary is None else {**described, "vocabulary": vocabulary}

    def _pass(self) -> Status:
        """Train until the end of the pass over the training set or of the run, a stop or a divergence."""
        position, messages = self.position, StepMessages(self.world)
        started = perf_counter()
        self._sampler.set_epoch(position.epoch)
        self._replica.train()
        status: Status = "finished"
        train = self.task.augmented(self._train, seed=self.job.seed, epoch=position.epoch)
        batches = islice(self._batches, position.batch, position.batch + self.total_steps - position.step)
        for inputs, targets in self._read(train, batches):
            try:
                loss = self._step(inputs, targets)
            except DivergedError:  # before the loss of the step is known
                status = "diverged"
                break
            position.step += 1
            position.batch += 1
            save = self._is_due(self._unsaved_seconds)
            summary = messages.exchange(loss, size(inputs) * self.world.size, stop=self._stop(), save=save)
            status = self._receive(summary)
            if status == "finished" and summary and summary.save and not self._pass_ended():
                status = self._receive(messages.flush())
                if status == "finished":
                    position.seconds += perf_counter() - started
                    self._save_checkpoint()
                    started = perf_counter()
            if status != "finished":
                break
        status = max(status, self._receive(messages.flush()), key=_SEVERITY.index)
        ended = self._pass_ended()
        if self.averager is not None and ended and status != "diverged":
            # All ranks must have equal parameters in an evaluation.
            try:
                self.averager.next_epoch() if position.batch == len(self._batches) else self.averager.synchronize()
            except DivergedError:
                status = "diverged"
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        position.seconds += perf_counter() - started
        if position.batch == len(self._batches):
            if isinstance(self.scheduler, Plateau) and status != "diverged":
                self.scheduler.end_epoch(position.loss_sum / position.samples)
            position.epoch, position.batch = position.epoch + 1, 0
            if self.preconditioner is not None:
                self.preconditioner.next_epoch()
        return self._evaluate(status) if ended and status != "diverged" else status

    def _pass_ended(self) -> bool:
        """Return whether the pass over the training set or the run is complete."""
        return self.position.batch == len(self._batches) or self.position.step == self.total_steps

    def _is_due(self, seconds: float) -> bool:
        """Return whether this is rank 0 and the last checkpoint is older than that."""
        return self._save is not None and self.world.is_leader and perf_counter() - self._saved_at >= seconds

    def _save_checkpoint(self) -> None:
        """Save a checkpoint. Collective."""
        assert self._save is not None
        if self._is_elastic and self.averager is not None and self.position.batch:  # within a pass
            self.averager.synchronize()
        self._save(self)
        self._saved_at = perf_counter()
        self._unsaved_seconds = max(self._save_seconds, _LONGEST_WITHOUT_CHECKPOINT)

    def _receive(self, summary: StepSummary | None) -> Status:
        """Record the loss of a step, and return whether to go on."""
        if summary is None:
            return "finished"
        self.position.loss_sum += summary.loss * summary.samples
        self.position.samples += summary.samples
        if self.world.is_leader:
            self._observer.step(self, summary.loss)
        return "diverged" if not isfinite(summary.loss) else "stopped" if summary.stop else "finished"

    def _step(self, inputs: Batch, targets: Batch) -> Tensor:
        """Take one optimizer step and return this rank's mean loss."""
        inputs, targets = self._additions.augment(inputs, targets)
        count = min(self.job.accumulate, size(inputs))
        parts = list(zip(split(inputs, count), split(targets, count), strict=True))
        seen: Counter[str] = Counter()

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            seen.clear()
            total = torch.zeros((), device=self.world.device)
            for number, (part, labels) in enumerate(parts, 1):
                with self._without_reduction() if number < count else nullcontext():
                    outputs = self._replica(part)
                    loss = self.task.loss(outputs, labels) / count
                    if self.preconditioner is not None:
                        self.preconditioner.backward(loss, outputs, self.task.mask(labels))
                    else:
                        loss.backward()
                total += loss.detach()
                seen.update(self.task.count_outputs(outputs))
            if self.averager is not None:
                self.averager.average_gradients()
            self._additions.change_gradients()
            if self.preconditioner is not None:
                self.preconditioner.step(self._count(targets, seen))
            return total

        loss: Tensor
        if self.averager is None:
            loss = self.optimizer.step(closure)  # type: ignore[arg-type,assignment]
        else:
            loss = closure()
            self.averager.step(loss)
        self._additions.change_weights()
        self.scheduler.step()
        return loss.detach()

    def _count(self, targets: Batch, seen: Mapping[str, float]) -> Count | None:
        """Return the positions that counted in the loss of a step, of layers that have a curvature."""
        # Natural Muon's update does not depend on the reduction, and its preconditioner takes no count.
        if self.job.curvature == "none":
            return None
        count = seen or self.task.count(targets)
        if not isinstance(count, Mapping):
            return count
        return {pattern: number for pattern, number in count.items() if fnmatch.filter(self._covered, pattern)}

    def _without_reduction(self) -> Any:
        replica = self._replica
        return replica.no_sync() if isinstance(replica, DistributedDataParallel) else nullcontext()

    def _evaluate(self, status: Status) -> Status:
        """Evaluate the model, and save a checkpoint if one is due."""
        position = self.position
        metric = self._metric()
        if not isfinite(metric):
            return "diverged"
        due = self._is_due(min(self._save_seconds, self._unsaved_seconds))
        unreadable = self.task.unreadable()
        values = (_peak_bytes(self.world.device), due, len(unreadable))
        peak, due_anywhere, unreadable_anywhere = self.world.maxima(*values)
        point = Point(
            epoch=position.epoch,
            step=position.step,
            seconds=position.seconds,
            loss=position.loss_sum / position.samples,
            metric=metric,
            learning_rate=float(self.scheduler.get_last_lr()[0]),
            samples_per_second=position.samples / (position.seconds - position.point_seconds),
            share=self.share(),
            peak_bytes=int(peak),
            unreadable=len(self.world.union(unreadable)) if unreadable_anywhere else 0,
            averaging=self._averaging(),
        )
        self.points.append(point)
        position.loss_sum, position.samples, position.point_seconds = 0.0, 0, position.seconds
        if self.world.is_leader:
            self._observer.point(self, point)
        if due_anywhere and status == "finished":
            self._save_checkpoint()
        return status

    def _averaging(self) -> dict[str, float | str]:
        """Return the averager's metrics and traffic. Collective."""
        if self.averager is None:
            return {}
        sent = self.averager.traffic()
        links = ("inside", "between")
        total = self.world.totals(*(sent[link] for link in links))
        return {
            "nodes": describe(self.averager.grid.nodes, self.world.size),
            "phase": self.averager.phase,
            **_plain(self.averager.metrics()),
            **{f"bytes/{link}": count for link, count in zip(links, total, strict=True)},
        }

    def _read(self, samples: Samples, batches: Iterable[list[int]]) -> Iterator[tuple[Batch, Batch]]:
        """Return the batches with these indices on the device of this rank, read ahead if the task asks for that."""
        if self.task.reading_processes:
            _allow_open_files()
        loader: DataLoader[Any] = DataLoader(
            samples,  # type: ignore[arg-type]  # any sequence will do
            batch_size=None,  # the sampler makes batches
            sampler=batches,
            collate_fn=_unchanged,  # torch's own turns tuples into lists
            num_workers=self.task.reading_processes,
            worker_init_fn=_ignore_interrupts,
            generator=torch.Generator(),  # the loader draws a seed, which must not change the run's random numbers
        )
        try:
            for inputs, targets in loader:
                yield to(inputs, self.world.device), to(targets, self.world.device)
        except DataError as error:  # from another process, with its traceback before the message
            raise DataError(str(error).rpartition("DataError: ")[2].strip()) from error

    @torch.no_grad()
    def _metric(self) -> float:
        """Return the task's metric on the test set; each rank evaluates a part of it."""
        self.world.share_buffers(self.model.buffers())
        self.model.eval()
        evaluator = self.task.evaluator()
        indices = range(self.world.rank, len(self._test), self.world.size)
        batches = BatchSampler(indices, self.task.evaluation_batch, drop_last=False)
        for inputs, targets in self._read(self._test, batches):
            evaluator.update(to(self.model(inputs), "cpu"), to(targets, "cpu"))
        return float(evaluator.compute())

    def _preconditioner_seconds(self) -> float:
        spent = seconds_spent(self.preconditioner) if self.preconditioner is not None else 0.0
        return self.position.preconditioner_seconds + spent


def _unchanged(batch: Any) -> Any:
    return batch


def _allow_open_files() -> None:
    """Let this process and its readers open as many files as the system allows.

    Each tensor from a reader is an open file: 16 batches of 16 pictures with objects exceed the usual limit of 1024.
    """
    if get_sharing_strategy() == "file_descriptor":
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _ignore_interrupts(process: int) -> None:
    """Let Ctrl-C and SIGTERM reach the ranks alone, which then save a checkpoint and end their readers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


_SEVERITY: list[Status] = ["finished", "stopped", "diverged"]


def _plain(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _peak_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes: allocated on a GPU, resident for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
