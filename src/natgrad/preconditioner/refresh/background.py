"""Asynchronous refreshes: placement "background", the collective form of PS-KFAC (Ba et al. 2017).

The first refresh is synchronous. After it, a step in which factors are due only starts to send its sums, and the next
step adds them to the running averages. A step t in which inverses are due copies the averages of the captures before
it, and a thread on each owner decomposes its part. Step ``t + staleness`` waits for the thread, exchanges the results
and is the first to use them; an earlier step does so if inverses are due again. All this depends only on counters and
on averages that all ranks hold, so all ranks stay identical to the last bit. For the same reason each rank can save
what a decomposition in progress began with, and a resumed training starts it again and uses it at the same step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from natgrad.capture.sums import StatisticsBuffer
from natgrad.curvature import Curvature
from natgrad.distributed import Communicator, Plan
from natgrad.errors import CurvatureError, require
from natgrad.preconditioner.guard.guard import FailureCounters
from natgrad.preconditioner.guard.inspection import Inspection
from natgrad.preconditioner.refresh.averages import update_averages
from natgrad.preconditioner.refresh.tasks import RAISED, TaskRun, compute, conclude, task_runs
from natgrad.schedule import check_number, check_whole
from natgrad.specs import Statistic, Task
from natgrad.state.averages import snapshot, unpacked
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.counters import StepCounters
from natgrad.state.results import allocate_results, previous

_Outcome: TypeAlias = tuple[dict[str, Tensor], Tensor]


@dataclass(eq=False)
class _Refresh:
    """A refresh in progress, which began in the step `begun`. Its layers `keys` and its `runs` are equal on all ranks.

    `pieces` holds, for each run of this rank, the blocks that are decomposed together and the futures of their results.
    `before` is the step that started the previous refresh. `averages` holds packed copies for checkpoints, by layer.
    """

    begun: int
    before: int
    damping: float
    averages: list[tuple[BlockGroup, LayerBlocks, dict[str, Tensor]]]
    runs: list[TaskRun]
    pieces: list[list[tuple[slice, Future[_Outcome]]]]


class BackgroundRefresh:
    """The sums being sent and the refresh in progress of one preconditioner."""

    def __init__(self) -> None:
        """Start with nothing in progress. The thread starts with the first refresh."""
        self._departed: StatisticsBuffer | None = None
        self._refresh: _Refresh | None = None
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
        """Start to send the closed `sums` of this step, which the next step adds to the running averages."""
        sums.post(runtime, wire)
        if not inspection.looked:  # once
            sums.wait()
            inspection.look(groups, sums, runtime)
        self._departed = sums.split_off()
        if groups:
            progress.record_factors()  # nothing reads the averages before they are updated

    def fold(self, failure_counters: FailureCounters) -> None:
        """Add the sums being sent to the running averages. Nothing is sent, so that a checkpoint may do so earlier."""
        if self._departed is None:
            return
        departed, self._departed = self._departed, None
        update_averages(departed, failure_counters)

    # --- Refreshes ----------------------------------------------------------------------------------------------

    def begin(
        self,
        groups: list[BlockGroup],
        plan: Plan[str],
        runtime: Communicator,
        keys: set[str],
        damping: float,
        progress: StepCounters,
    ) -> bool:
        """Start to run the tasks of some layers, as `run_tasks` does; return whether there is anything to do.

        No refresh may be in progress, and one has been completed. `keys` are the same on every rank.
        """
        before = progress.last_inverses
        assert self._refresh is None
        assert before is not None
        runs = task_runs(groups, plan, keys)
        if not runs:
            return False
        pieces = [self._submit(run, damping) if run.owner == runtime.rank else [] for run in runs]
        averages = list(_copies(groups, keys))
        self._refresh = _Refresh(progress.step, before, damping, averages, runs, pieces)
        progress.last_inverses = progress.step
        return True

    @property
    def keys(self) -> set[str]:
        """The keys of the layers whose refresh is in progress."""
        return set() if self._refresh is None else {member.layer.key for _, member, _ in self._refresh.averages}

    def collect(
        self,
        plan: Plan[str],
        runtime: Communicator,
        failure_counters: FailureCounters,
        progress: StepCounters,
        wire: torch.dtype | None,
        *,
        at_once: bool = False,
    ) -> None:
        """End the refresh in progress if it started `staleness` steps ago, or at once; exchange and hold the results.

        Raises:
            CurvatureError: on all ranks, if the thread of any rank raised an error other than a failed decomposition.
                The layers concerned keep their old results.
        """
        refresh = self._refresh
        if refresh is None or not (at_once or progress.step - refresh.begun >= plan.placement.staleness):
            return
        self._refresh, error = None, None
        for run, pieces in zip(refresh.runs, refresh.pieces, strict=True):
            allocate_results(run.group)
            raised = self._keep(run, pieces)
            error = error or raised
        conclude(refresh.runs, plan.column(runtime.rank), runtime, failure_counters, wire)
        progress.inverse_updates += 1
        stopped = [run for run in refresh.runs if RAISED in run.success]
        if stopped:
            names = ", ".join(dict.fromkeys(member.layer.key for run in stopped for member in run.members))
            owners = ", ".join(str(owner) for owner in sorted({run.owner for run in stopped}))
            raise CurvatureError(
                f"decomposing {names} in the background has raised an error on rank {owners}"
            ) from error

    def drop(self) -> None:
        """Drop the refresh in progress."""
        if self._refresh is not None:
            for pieces in self._refresh.pieces:
                for _, future in pieces:
                    future.cancel()
            self._refresh = None

    def close(self) -> None:
        """End the thread after its current decomposition. The refresh in progress remains in the state."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None

    def state_dict(self) -> dict[str, Any]:
        """Return, if a refresh is in progress, the step of the last completed one and what starts this one again.

        Both are in one tuple, because ``torch.distributed.checkpoint`` only loads entries that a new state also has,
        and tuples as they were saved.
        """
        refresh = self._refresh
        if refresh is None:
            return {}
        averages = {}
        for group, member, copies in refresh.averages:
            tensors = copies | unpacked(copies, group.statistics)
            averages[member.layer.key] = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        begun = {"step": refresh.begun, "damping": refresh.damping, "averages": averages}
        return {"last_inverses": (refresh.before, begun)}

    def _submit(self, run: TaskRun, damping: float) -> list[tuple[slice, Future[_Outcome]]]:
        """Submit the decompositions of a run on copies of its averages to the thread."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="natgrad")
            # The thread ends when the preconditioner is deleted.
            weakref.finalize(self, self._thread.shutdown, wait=False, cancel_futures=True)
        group, task = run.group, run.task
        copies = []
        for blocks in run.pieces():
            averages, before = snapshot(group, blocks, task.reads, task.diagonal_of), previous(group, task, blocks)
            before = None if before is None else {name: tensor.clone() for name, tensor in before.items()}
            copies.append((blocks, averages, before))
        stream, pieces = self._stream(group.device), []
        for blocks, averages, before in copies:
            work = group.curvature, task, group.statistics, damping * group.factor, averages, before, stream
            pieces.append((blocks, self._thread.submit(_decompose, *work)))
        return pieces

    def _keep(self, run: TaskRun, pieces: list[tuple[slice, Future[_Outcome]]]) -> Exception | None:
        """Wait for the thread and store its results; return the error that was raised, if any."""
        group, error = run.group, None
        for blocks, future in pieces:
            try:
                written, fine = future.result()
            except Exception as raised:
                failed = isinstance(raised, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
                error = error if failed else raised
                run.success += [0.0 if failed else RAISED] * (blocks.stop - blocks.start)
                continue
            for tensor in (*written.values(), fine):
                if tensor.device in self._streams:
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            place = group.device, group.work_dtype  # the model may have been moved since
            run.keep(blocks, {name: tensor.to(*place) for name, tensor in written.items()}, fine.to(group.device))
        return error

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the CUDA stream of the thread, after making it wait for the work enqueued so far."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]


def separated(state: Any) -> tuple[Any, dict[str, Any] | None]:
    """Return a state without the refresh in progress that it holds (`BackgroundRefresh.state_dict`), and that.

    None: there is none. Otherwise the step, the damping, the keys of the layers and the blocks with which it began.

    Raises:
        ValueError: if it is incomplete. Its averages are not checked.
    """
    last = state.get("last_inverses") if isinstance(state, Mapping) else None
    if not isinstance(last, tuple):
        return state, None
    name, fields = "state['last_inverses']", {"step", "damping", "averages"}
    fits = len(last) == 2 and isinstance(last[1], Mapping) and last[1].keys() == fields
    require(fits, name, type(last).__name__, "a whole number, or a tuple of that and the refresh in progress")
    before, begun = last
    check_whole(f"{name}[1]['step']", begun["step"], 0)
    check_number(f"{name}[1]['damping']", begun["damping"], "a number above 0", minimum=0, strict=True)
    blocks, averages = state.get("blocks"), begun["averages"]
    fits = all(
        isinstance(found, Mapping) and all(isinstance(one, Mapping) for one in found.values())
        for found in (blocks, averages)
    )
    require(fits, f"{name}[1]['averages']", type(averages).__name__, "a dict of dicts of tensors, as state['blocks']")
    merged = {**blocks, **{key: {**blocks.get(key, {}), **tensors} for key, tensors in averages.items()}}
    found = {"step": begun["step"], "damping": begun["damping"], "keys": set(averages), "blocks": merged}
    return {**state, "last_inverses": before}, found


def _copies(groups: list[BlockGroup], keys: set[str]) -> Iterator[tuple[BlockGroup, LayerBlocks, dict[str, Tensor]]]:
    """Yield packed copies of the running averages of some layers, and of their bias corrections."""
    for group in groups:
        averages, weight = group.state.averages, group.state.weight
        for member in group.members:
            if member.layer.key in keys and weight is not None:
                tensors = {name: averages.read(name, member.blocks).clone() for name in averages}
                yield group, member, tensors | {"weight": weight[member.blocks].clone()}


def _decompose(
    curvature: Curvature,
    task: Task,
    statistics: tuple[Statistic, ...],
    damping: float,
    averages: Mapping[str, Tensor],
    previous: Mapping[str, Tensor] | None,
    stream: torch.cuda.Stream | None,
) -> _Outcome:
    """Run a task for some blocks, in the thread.

    The thread does not use `full_products`, because it changes settings of the whole process.
    """
    beside: AbstractContextManager[Any] = nullcontext() if stream is None else torch.cuda.stream(stream)
    with torch.no_grad(), beside:
        read = unpacked(averages, statistics, task.diagonal_of)
        written, fine = compute(curvature, task, read, damping, previous)
        if stream is not None:
            stream.synchronize()  # before inputs are freed and results are read
    return written, fine
