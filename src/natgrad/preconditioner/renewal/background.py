"""Renewals beside the steps: placement "background", the collective form of PS-KFAC (Ba et al. 2017).

Once there is curvature to go on with, a step in which factors are due only posts its sums, and the next one folds them
into the running averages, before anything else. A step t in which inverses are due takes a copy of the averages of what
was captured before it; a thread of each owner decomposes its share of them. Step ``t + staleness`` waits for that
thread, exchanges the results and is the first to use them; or an earlier step, if inverses are due again. Which step
does what depends on nothing but counters, and which layers on averages that all ranks have, so that it is the same on
all of them, and ranks stay equal to the last bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from natgrad.capture.sums import Departed, StatisticsBuffer
from natgrad.curvature import Curvature
from natgrad.distributed import Communicator, Plan
from natgrad.errors import CurvatureError
from natgrad.preconditioner.counters import StepCounters
from natgrad.preconditioner.guard.guard import FailureCounters
from natgrad.preconditioner.guard.inspection import Inspection
from natgrad.preconditioner.renewal.averages import fold
from natgrad.preconditioner.renewal.renew import RAISED, Job, compute, conclude, jobs_of
from natgrad.specs import Statistic, Task
from natgrad.state.block_group import BlockGroup, unpacked


@dataclass(frozen=True)
class _Outcome:
    """What the thread has made of some blocks: the tensors of a task, which blocks succeeded, and in what time."""

    written: Mapping[str, Tensor]
    fine: Tensor
    seconds: float


@dataclass(eq=False)
class _Renewal:
    """A renewal under way.

    Attributes:
        begun: The step that began it.
        before: The step that began the one before.
        keys: The keys of its layers, the same on all ranks.
        jobs: Its jobs, likewise.
        pieces: For each job that is this rank's the blocks that are decomposed together, and the thread's answers.
    """

    begun: int
    before: int | None
    keys: set[str]
    jobs: list[Job]
    pieces: list[list[tuple[slice, Future[_Outcome]]]] = field(default_factory=list)

    def cancel(self) -> None:
        for _, future in self._all():
            future.cancel()

    def _all(self) -> Iterator[tuple[slice, Future[_Outcome]]]:
        return (piece for own in self.pieces for piece in own)


class Background:
    """What is under way beside the steps of one preconditioner: sums that travel, and a renewal.

    Attributes:
        seconds: What the thread has worked so far while the steps went on, none of them waiting for it.
    """

    def __init__(self) -> None:
        """Begin with nothing; the thread starts with the first renewal."""
        self.seconds = 0.0
        self._departed: tuple[Departed, int] | None = None
        self._renewal: _Renewal | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    # --- Sums ---------------------------------------------------------------------------------------------------

    def post(
        self,
        stacks: list[BlockGroup],
        sums: StatisticsBuffer,
        runtime: Communicator,
        progress: StepCounters,
        inspection: Inspection,
        wire: Any,
    ) -> None:
        """Send the closed `sums` of this step, which the next one folds.

        Args:
            stacks: All stacks.
            sums: Those of this step, closed.
            runtime: The ranks.
            progress: Is told that factors were renewed: nothing reads them before they are.
            inspection: Looks at the sums, if it has not yet; that waits for them.
            wire: The dtype in which sums travel, if narrower than their own.
        """
        posted = sums.post(runtime, wire)
        if not inspection.looked:
            for message in posted:
                message.wait()
            inspection.look(stacks, sums, runtime)
        self._departed = sums.depart(posted), progress.step
        if stacks:
            progress.renewed_factors()

    def fold(self, watch: FailureCounters, *, alone: bool = False) -> Tensor | Sequence[float] | None:
        """Add the sums under way to the running averages; from the next step on they would be there anyway.

        Args:
            watch: Counts what is skipped.
            alone: Send nothing. Sums in a narrow dtype, whose second half is yet to travel, then stay under way.

        Returns:
            What the ranks have told beside them (`natgrad.capture.sums.StatisticsBuffer.heard`).
        """
        if self._departed is None or (alone and not self._departed[0].whole):
            return None
        (departed, step), self._departed = self._departed, None
        fold(departed, watch, step)
        return departed.heard

    # --- Renewals -----------------------------------------------------------------------------------------------

    def begin(
        self,
        stacks: list[BlockGroup],
        plan: Plan[str],
        runtime: Communicator,
        keys: set[str],
        kept: Collection[tuple[str, str]],
        damping: float,
        progress: StepCounters,
    ) -> bool:
        """Begin to renew some layers from their running averages as they are now; none may be under way.

        Args:
            stacks: All stacks.
            plan: The owner of each task.
            runtime: The ranks.
            keys: The layers, which have statistics; the same on every rank.
            kept: That of `renew`; likewise.
            damping: γ of this renewal.
            progress: Is told that this is the step of the renewal.

        Returns:
            Whether there is anything to do.
        """
        assert self._renewal is None
        jobs = jobs_of(stacks, plan, keys, kept=kept)
        if not jobs:
            return False
        renewal = _Renewal(progress.step, progress.last_inverses, keys, jobs)
        renewal.pieces += [self._submit(job, damping) if job.owner in (None, runtime.rank) else [] for job in jobs]
        self._renewal = renewal
        progress.last_inverses = progress.step
        return True

    @property
    def keys(self) -> set[str]:
        """The keys of the layers whose renewal is under way."""
        return set() if self._renewal is None else self._renewal.keys

    def collect(
        self,
        plan: Plan[str],
        runtime: Communicator,
        watch: FailureCounters,
        progress: StepCounters,
        wire: torch.dtype | None,
        *,
        early: bool = False,
    ) -> None:
        """End the renewal under way, if it was begun `staleness` steps ago: wait, exchange the results and hold them.

        Args:
            plan: Who exchanges, and the staleness.
            runtime: The ranks.
            watch: Counts what failed.
            progress: The step, and what was renewed.
            wire: The dtype in which matrices travel, if narrower than that in which they are held.
            early: End it in any case.

        Raises:
            CurvatureError: on all ranks, if the thread of any was stopped by another error than that of a
                decomposition; what it would have renewed stays as it was.
        """
        renewal = self._renewal
        if renewal is None or not (early or progress.step - renewal.begun >= plan.placement.staleness):
            return
        self._renewal = None
        success, own = [], None
        for job, pieces in zip(renewal.jobs, renewal.pieces, strict=True):
            job.stack.allocate_held()
            error, beside = _keep(job, pieces)
            own, self.seconds = own or error, self.seconds + beside
            success.append(job.success)
        stopped = conclude(renewal.jobs, success, plan.column(runtime.rank), runtime, watch, wire)
        progress.inverse_updates += 1
        if stopped:
            names = ", ".join(dict.fromkeys(member.layer.key for job in stopped for member in job.members))
            owners = ", ".join(str(owner) for owner in sorted({job.owner or 0 for job in stopped}))
            raise CurvatureError(f"renewing {names} in the background has raised an error on rank {owners}") from own

    def drop(self, progress: StepCounters) -> None:
        """Forget the renewal under way; the next step begins one anew."""
        if self._renewal is not None:
            self._renewal.cancel()
            progress.last_inverses = self._renewal.before
            self._renewal = None

    def close(self, progress: StepCounters) -> None:
        """Drop the renewal under way, and end the thread once the decomposition that it is at is done."""
        self.drop(progress)
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None

    def state_dict(self) -> dict[str, int]:
        """Return what a training that resumes without the renewal under way has to know: since when it is due."""
        before = None if self._renewal is None else self._renewal.before
        return {} if before is None else {"last_inverses": before}

    def _submit(self, job: Job, damping: float) -> list[tuple[slice, Future[_Outcome]]]:
        """Have the thread decompose a copy of what a job reads."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="natgrad")
            # A preconditioner that is deleted takes its thread along.
            weakref.finalize(self, self._thread.shutdown, wait=False, cancel_futures=True)
        stack, task, pieces = job.stack, job.task, []
        copies = []
        for blocks in job.pieces():
            averages, previous = stack.snapshot(blocks, task.reads, task.diagonal_of), stack.previous(task, blocks)
            state = _copied(stack.remembered(blocks, task.reads))
            copies.append((blocks, averages, state, None if previous is None else _copied(previous)))
        stream = self._stream(stack.device)
        for blocks, averages, state, previous in copies:
            work = stack.curvature, task, stack.statistics, averages, state, damping * stack.factor, previous, stream
            pieces.append((blocks, self._thread.submit(_decompose, *work)))
        return pieces

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the stream of the thread, on which what is to come waits for what this one has enqueued so far."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in memory of their own."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _decompose(
    curvature: Curvature,
    task: Task,
    statistics: tuple[Statistic, ...],
    averages: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    damping: float,
    previous: Mapping[str, Tensor] | None,
    stream: torch.cuda.Stream | None,
) -> _Outcome:
    """Do a task for some blocks, in the thread.

    What torch may do to products (`products.full_products`) is a setting of the process, which a thread cannot change
    for itself.
    """
    started = perf_counter()
    beside: AbstractContextManager[Any] = nullcontext() if stream is None else torch.cuda.stream(stream)
    with torch.no_grad(), beside:
        read = {**unpacked(averages, statistics, task.diagonal_of), **state}
        written, fine = compute(curvature, task, read, damping, previous)
        if stream is not None:
            stream.synchronize()  # what was read may go, what was written may be read
    return _Outcome(written, fine, perf_counter() - started)


def _keep(job: Job, pieces: list[tuple[slice, Future[_Outcome]]]) -> tuple[Exception | None, float]:
    """Wait for the thread and hold what it has made; note it as `conclude` takes it.

    Returns:
        What was raised, and how long the thread has worked without being waited for.
    """
    job.done.update(dict.fromkeys(range(job.start, job.stop), 0.0))
    raised: Exception | None = None
    seconds = waited = 0.0
    for blocks, future in pieces:
        own, started = range(blocks.start, blocks.stop), perf_counter()
        try:
            outcome = future.result()
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue  # a failure like those that `renew` tells of
        except Exception as error:
            job.done.update(dict.fromkeys(own, RAISED))
            raised = error
            continue
        waited += perf_counter() - started
        stack = job.stack
        for tensor in (*outcome.written.values(), outcome.fine):
            if tensor.device.type == "cuda":
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        place = stack.device, stack.work_dtype  # of a model that was moved meanwhile
        written = {name: tensor.to(*place) for name, tensor in outcome.written.items()}
        kept = job.keep(blocks, written, outcome.fine.to(stack.device))
        job.done.update(zip(own, map(float, kept), strict=True))
        seconds += outcome.seconds
    if pieces:
        job.stack.charge(job.members, seconds)
    return raised, max(0.0, seconds - waited)
