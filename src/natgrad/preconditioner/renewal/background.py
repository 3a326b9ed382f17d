"""Asynchronous renewals: placement "background", the collective form of PS-KFAC (Ba et al. 2017).

The first renewal is synchronous. After it, a step in which factors are due only starts to send its sums, and the next
step adds them to the running averages. A step t in which inverses are due copies the averages of the captures before
it, and a thread on each owner decomposes its part. Step ``t + staleness`` waits for the thread, exchanges the results
and is the first to use them; an earlier step does so if inverses are due again. All this depends only on counters and
on averages that all ranks hold, so all ranks stay identical to the last bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from natgrad.capture.sums import StatisticsBuffer
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
    """The results of a task for some blocks: its tensors, which blocks succeeded, and the seconds it took."""

    written: Mapping[str, Tensor]
    fine: Tensor
    seconds: float


@dataclass(eq=False)
class _Renewal:
    """A renewal in progress.

    Attributes:
        begun: The step that started it.
        before: The step that started the previous one.
        keys: The keys of its layers, the same on all ranks.
        jobs: Its jobs, the same on all ranks.
        pieces: For each job of this rank, the blocks that are decomposed together and the futures of their results.
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
    """The sums being sent and the renewal in progress of one preconditioner.

    Attributes:
        seconds: The time that the thread has worked so far without a step waiting for it.
    """

    def __init__(self) -> None:
        """Start with nothing in progress. The thread starts with the first renewal."""
        self.seconds = 0.0
        self._departed: tuple[StatisticsBuffer, int] | None = None
        self._renewal: _Renewal | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    # --- Sums ---------------------------------------------------------------------------------------------------

    def post(
        self,
        groups: list[BlockGroup],
        sums: StatisticsBuffer,
        runtime: Communicator,
        progress: StepCounters,
        inspection: Inspection,
        wire: Any,
    ) -> None:
        """Start to send the `sums` of this step, which the next step adds to the running averages.

        Args:
            groups: All groups.
            sums: The closed sums of this step.
            runtime: The ranks.
            progress: Records that factors were updated; nothing reads them before they are.
            inspection: Inspects the sums once, which waits for them.
            wire: The dtype in which sums are sent, if narrower than their own.
        """
        sums.post(runtime, wire)
        if not inspection.looked:
            sums.wait()
            inspection.look(groups, sums, runtime)
        self._departed = sums.split_off(), progress.step
        if groups:
            progress.renewed_factors()

    def fold(self, watch: FailureCounters, *, alone: bool = False) -> None:
        """Add the sums being sent to the running averages.

        Args:
            watch: Counts blocks with non-finite sums.
            alone: Do not communicate. Sums in a narrow dtype, which need a second message, are then left as they are.
        """
        if self._departed is None or (alone and not self._departed[0].arrives_alone):
            return
        (departed, step), self._departed = self._departed, None
        fold(departed, watch, step)

    # --- Renewals -----------------------------------------------------------------------------------------------

    def begin(
        self,
        groups: list[BlockGroup],
        plan: Plan[str],
        runtime: Communicator,
        keys: set[str],
        kept: Collection[tuple[str, str]],
        damping: float,
        progress: StepCounters,
    ) -> bool:
        """Start to renew some layers from their present running averages. No renewal may be in progress.

        Args:
            groups: All groups.
            plan: The owner of each task.
            runtime: The ranks.
            keys: The layers, which have statistics; the same on every rank.
            kept: The parts not to renew, as in `renew`; the same on every rank.
            damping: γ of this renewal.
            progress: Records the step of the renewal.

        Returns:
            Whether there is anything to do.
        """
        assert self._renewal is None
        jobs = jobs_of(groups, plan, keys, kept=kept)
        if not jobs:
            return False
        renewal = _Renewal(progress.step, progress.last_inverses, keys, jobs)
        renewal.pieces += [self._submit(job, damping) if job.owner in (None, runtime.rank) else [] for job in jobs]
        self._renewal = renewal
        progress.last_inverses = progress.step
        return True

    @property
    def keys(self) -> set[str]:
        """The keys of the layers whose renewal is in progress."""
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
        """End the renewal in progress if it started `staleness` steps ago: wait, exchange and hold the results.

        Args:
            plan: The assignment of ranks, and the staleness.
            runtime: The ranks.
            watch: Counts failures.
            progress: The step counters.
            wire: The dtype in which matrices are sent, if narrower than that in which they are held.
            early: End it in any case.

        Raises:
            CurvatureError: on all ranks, if the thread of any rank raised an error other than a failed decomposition.
                The layers concerned keep their old results.
        """
        renewal = self._renewal
        if renewal is None or not (early or progress.step - renewal.begun >= plan.placement.staleness):
            return
        self._renewal = None
        success, own = [], None
        for job, pieces in zip(renewal.jobs, renewal.pieces, strict=True):
            job.group.allocate_results()
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
        """Drop the renewal in progress; the next step starts it again."""
        if self._renewal is not None:
            self._renewal.cancel()
            progress.last_inverses = self._renewal.before
            self._renewal = None

    def close(self, progress: StepCounters) -> None:
        """Drop the renewal in progress, and end the thread after its present decomposition."""
        self.drop(progress)
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None

    def state_dict(self) -> dict[str, int]:
        """Return the step of the last completed renewal, if one is in progress: a resumed training starts it again."""
        before = None if self._renewal is None else self._renewal.before
        return {} if before is None else {"last_inverses": before}

    def _submit(self, job: Job, damping: float) -> list[tuple[slice, Future[_Outcome]]]:
        """Submit the decompositions of a job on copies of its averages to the thread."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="natgrad")
            # The thread ends when the preconditioner is deleted.
            weakref.finalize(self, self._thread.shutdown, wait=False, cancel_futures=True)
        group, task, pieces = job.group, job.task, []
        copies = []
        for blocks in job.pieces():
            averages, previous = group.snapshot(blocks, task.reads, task.diagonal_of), group.previous(task, blocks)
            state = _copied(group.read_memory(blocks, task.reads))
            copies.append((blocks, averages, state, None if previous is None else _copied(previous)))
        stream = self._stream(group.device)
        for blocks, averages, state, previous in copies:
            work = group.curvature, task, group.statistics, averages, state, damping * group.factor, previous, stream
            pieces.append((blocks, self._thread.submit(_decompose, *work)))
        return pieces

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the CUDA stream of the thread, after making it wait for the work enqueued so far."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors."""
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
    """Run a task for some blocks, in the thread.

    The thread does not use `products.full_products`, because it changes settings of the whole process.
    """
    started = perf_counter()
    beside: AbstractContextManager[Any] = nullcontext() if stream is None else torch.cuda.stream(stream)
    with torch.no_grad(), beside:
        read = {**unpacked(averages, statistics, task.diagonal_of), **state}
        written, fine = compute(curvature, task, read, damping, previous)
        if stream is not None:
            stream.synchronize()  # before inputs are freed and results are read
    return _Outcome(written, fine, perf_counter() - started)


def _keep(job: Job, pieces: list[tuple[slice, Future[_Outcome]]]) -> tuple[Exception | None, float]:
    """Wait for the thread, hold its results and record them for `conclude`.

    Returns:
        The error that was raised, if any, and the seconds that the thread worked without being waited for.
    """
    job.done.update(dict.fromkeys(range(job.start, job.stop), 0.0))
    raised: Exception | None = None
    seconds = waited = 0.0
    for blocks, future in pieces:
        own, started = range(blocks.start, blocks.stop), perf_counter()
        try:
            outcome = future.result()
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue  # counted as a failed decomposition by `conclude`
        except Exception as error:
            job.done.update(dict.fromkeys(own, RAISED))
            raised = error
            continue
        waited += perf_counter() - started
        group = job.group
        for tensor in (*outcome.written.values(), outcome.fine):
            if tensor.device.type == "cuda":
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        place = group.device, group.work_dtype  # the model may have been moved since
        written = {name: tensor.to(*place) for name, tensor in outcome.written.items()}
        kept = job.keep(blocks, written, outcome.fine.to(group.device))
        job.done.update(zip(own, map(float, kept), strict=True))
        seconds += outcome.seconds
    if pieces:
        job.group.charge(job.members, seconds)
    return raised, max(0.0, seconds - waited)
