"""Compute inverses or eigenvectors from running averages: each task on its owner, the results to all workers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from natgrad.curvature import Curvature
from natgrad.distributed import Communicator, Plan, narrower
from natgrad.errors import NatgradError
from natgrad.linalg import tensor_on, triangle
from natgrad.linalg.device import full_products
from natgrad.preconditioner.guard.guard import FailureCounters
from natgrad.profiling import profiled
from natgrad.refresh.rule import READS, Reads, side_of
from natgrad.specs import Task, TensorSpec
from natgrad.state.averages import bias_corrections, corrected, restart
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.results import allocate_results, previous, record_results
from natgrad.state.tensors import StateTensors, along, pack, packed_shape, unpack

# Batches of more elements would not speed up decompositions, and would need more memory.
_BATCH = 2**18

RAISED = -1.0
"""In `TaskRun.success`: the block raised an error."""


@dataclass
class TaskRun:
    """A task for some neighbouring blocks of a group, on one owner.

    Attributes:
        success: For each block, above 0 if it succeeded, `RAISED` if it raised an error other than a failed
            decomposition.
        rows: The number of gathered rows, if the task reads rows.
    """

    owner: int
    group: BlockGroup
    task: Task
    start: int
    stop: int
    success: list[float] = field(default_factory=list)
    rows: int = 0

    @property
    def succeeded(self) -> list[bool]:
        """Whether each block succeeded."""
        return [number > 0 for number in self.success]

    @property
    def results(self) -> StateTensors:
        """Where the results of the blocks are stored."""
        return self.group.state.results

    @property
    def stored(self) -> torch.dtype:
        """The dtype in which matrices are stored."""
        return self.results.dtype

    def numel(self, spec: TensorSpec) -> int:
        """Return the number of elements that are sent of a tensor that the task writes."""
        return (self.stop - self.start) * prod(packed_shape(spec.sized(self.rows)))

    def read(self, spec: TensorSpec) -> Tensor:
        """Return a tensor that the task wrote, as it is sent ``[numel(spec)]``."""
        stored = self.results.read(spec.name, slice(self.start, self.stop))
        return pack(stored, spec).reshape(-1).to(self.group.work_dtype)

    def write(self, spec: TensorSpec, values: Tensor) -> None:
        """Store a received tensor."""
        sized = spec.sized(self.rows)
        self.results.write(
            spec.name, slice(self.start, self.stop), unpack(values.view(-1, *packed_shape(sized)), sized)
        )

    @property
    def blocks(self) -> list[int]:
        """The indices of the blocks in the group."""
        return list(range(self.start, self.stop))

    @property
    def members(self) -> list[LayerBlocks]:
        """The layers."""
        return [member for member in self.group.members if self.start <= member.start < self.stop]

    def pieces(self) -> Iterator[slice]:
        """Yield the blocks that are decomposed together."""
        whole = set(self.task.reads) - set(self.task.diagonal_of)
        read = sum(spec.numel for spec in self.group.statistics if spec.name in whole)
        step = max(1, _BATCH // max(read, sum(spec.numel for spec in self.task.writes)))
        good = self.group.state.good[self.task.name]
        start = self.start
        for stop in range(self.start + 1, self.stop + 1):
            # Blocks with a last result to start from are separate from those without.
            ends = stop == self.stop or stop - start == step
            if ends or (self.task.needs_previous and good[stop] != good[start]):
                yield slice(start, stop)
                start = stop

    def run(self, damping: float) -> None:
        """Run the task and store its results."""
        group, task = self.group, self.task
        for blocks in self.pieces():
            averages = corrected(group, blocks, task.reads, task.diagonal_of)
            before = previous(group, task, blocks)
            with full_products(group.device):
                written, fine = compute(group.curvature, task, averages, damping * group.factor, before)
            self.keep(blocks, written, fine)

    def keep(self, blocks: slice, written: Mapping[str, Tensor], fine: Tensor) -> None:
        """Store the results of the next blocks. Those that are not `fine` keep their old results."""
        results, flags = self.group.state.results, [bool(flag) for flag in fine.tolist()]
        for spec in self.task.writes:
            fresh = written[spec.name]
            if not all(flags):
                fresh = torch.where(along(fine, len(spec.shape)), fresh, results.read(spec.name, blocks))
            results.write(spec.name, blocks, fresh)
            if spec.symmetric:
                # Other ranks only receive the lower triangle, and all ranks must hold the same bits.
                triangle.mirror_(results[spec.name][blocks])
        self.success += map(float, flags)

    def record(self, failure_counters: FailureCounters) -> None:
        """Record which blocks succeeded, after the results have been shared."""
        blocks, flags = self.blocks, self.succeeded
        record_results(self.group, self.task.name, blocks, flags)
        restart(self.group, self.task, [block for block, fine in zip(blocks, flags, strict=True) if fine])
        failure_counters.count_failed_decompositions(self.group, self.task.name, blocks, flags)


def compute(
    curvature: Curvature,
    task: Task,
    averages: Mapping[str, Tensor],
    damping: float,
    previous: Mapping[str, Tensor] | None,
    rows: int = 0,
) -> tuple[dict[str, Tensor], Tensor]:
    """Call `Curvature.compute`, with gathered statistics on so many rows. A task that writes nothing always succeeds.

    Raises:
        NatgradError: if a tensor that the task writes is missing or of another shape, or what succeeded is not bool
            ``[N]``.
    """

    def wrong(found: str) -> NatgradError:
        return NatgradError(f"compute({task.name!r}) of {curvature!r} has returned {found}", "your-own-code")

    if not task.writes:
        first = next(iter(averages.values()))
        return {}, torch.ones(len(first), dtype=torch.bool, device=first.device)
    returned = curvature.compute(task.name, averages, damping, previous)
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[0], Mapping):
        raise wrong(f"a {type(returned).__name__}, not (tensors by name, which succeeded)")
    written, fine = returned
    known = next(iter(averages.values()), fine)
    if not (isinstance(fine, Tensor) and fine.dtype == torch.bool and fine.shape == known.shape[:1]):
        shown = f"{fine.dtype}{list(fine.shape)}" if isinstance(fine, Tensor) else repr(fine)
        raise wrong(f"{shown} as which blocks succeeded, not a bool for each of the blocks")
    for spec in task.writes:
        wanted = len(fine), *spec.sized(rows).shape
        found = tuple(written[spec.name].shape) if spec.name in written else "nothing"
        if found != wanted:
            raise wrong(f"{found} as {spec.name!r}, not a tensor of {wanted}")
    return written, fine


def observed(groups: list[BlockGroup]) -> set[str]:
    """Return the keys of the layers with statistics. Waits for the device."""
    keys = set()
    for group in groups:
        if group.state.weight is not None:
            seen = (torch.stack(bias_corrections(group)).amin(0) > 0).tolist()
            keys |= {member.layer.key for member in group.members if all(seen[member.blocks])}
    return keys


def run_tasks(
    groups: list[BlockGroup],
    plan: Plan[str],
    runtime: Communicator,
    keys: Collection[str],
    damping: float,
    failure_counters: FailureCounters,
    wire: torch.dtype | None = None,
    *,
    reads: Collection[Reads] = READS,
) -> bool:
    """Run the tasks of the layers `keys`, each on its owner, and exchange the results; return whether there were any.

    `keys` have statistics, and are the same on all workers of a layer. Only tasks are run that read statistics of
    inputs, of gradients, or of both, as `reads` says.
    """
    runs = task_runs(groups, plan, keys, reads=reads)
    with profiled("decompose"):
        for run in runs:
            allocate_results(run.group)
            if run.owner == runtime.rank:
                run.run(damping)
    conclude(runs, plan.column(runtime.rank), runtime, failure_counters, wire)
    return bool(runs)


def conclude(
    runs: Sequence[TaskRun],
    workers: Sequence[int],
    runtime: Communicator,
    failure_counters: FailureCounters,
    wire: torch.dtype | None,
) -> None:
    """End a refresh: exchange the results of its runs, and record which layers have curvature now.

    The runs are the same on all `workers`; those of this rank have been run.
    """
    if len(workers) > 1:
        _exchange(runs, workers, runtime, wire)
    for run in runs:
        run.record(failure_counters)


def task_runs(
    groups: list[BlockGroup],
    plan: Plan[str],
    keys: Collection[str],
    *,
    reads: Collection[Reads] = READS,
) -> list[TaskRun]:
    """Return the runs of the layers that this rank is a worker of, joining neighbouring layers of one owner."""
    runs: list[TaskRun] = []
    for group in groups:
        if not group.role.is_gradient_worker or group.gathered:
            continue
        for task in group.tasks:
            if side_of(task.reads, group.input_statistics) not in reads:
                continue
            for member in group.members:
                if member.layer.key not in keys:
                    continue
                owner, last = plan.assignments[member.layer.key].owners[task.name], runs[-1] if runs else None
                place = owner, group, task, member.start
                if last is not None and (last.owner, last.group, last.task, last.stop) == place:
                    last.stop = member.stop
                else:
                    runs.append(TaskRun(owner, group, task, member.start, member.stop))
    return runs


def _exchange(runs: Sequence[TaskRun], workers: Sequence[int], runtime: Communicator, wire: torch.dtype | None) -> None:
    """Send each owner's results, and whether each block succeeded, to all workers."""
    runtime.subgroup(workers)  # collective on all ranks, also if some columns have nothing to share yet
    buckets: dict[tuple[torch.device, torch.dtype, torch.dtype], list[tuple[TaskRun, TensorSpec | None]]] = {}
    for run in runs:
        dtype = run.group.work_dtype
        sent = narrower(narrower(wire, run.stored), dtype)
        for spec in run.task.writes:  # vectors are never rounded
            key = run.group.device, dtype, sent if len(spec.shape) > 1 else dtype
            buckets.setdefault(key, []).append((run, spec))
    for run in runs:  # whether each block succeeded
        buckets.setdefault((run.group.device, run.group.work_dtype, run.group.work_dtype), []).append((run, None))
    for (device, dtype, sent), bucket in buckets.items():
        owned = [[output for output in bucket if output[0].owner == worker] for worker in workers]
        sizes = [[run.stop - run.start if spec is None else run.numel(spec) for run, spec in own] for own in owned]
        place = workers.index(runtime.rank)
        flags = [flag for run, spec in owned[place] if spec is None for flag in run.success]
        parts = [run.read(spec) for run, spec in owned[place] if spec is not None]
        local = torch.cat([*parts, tensor_on(device, flags, dtype)])
        lengths = [sum(own) for own in sizes]
        shared = runtime.post_from_owners(local, lengths, "inverses", ranks=workers, wire=sent).wait()
        for index, numbers in enumerate(shared):
            if index == place and sent == dtype:
                continue  # they have not changed
            pieces = list(zip(owned[index], numbers.split(sizes[index]), strict=True))
            for (run, written), values in pieces:
                if written is not None:
                    run.write(written, values)
            received = [(run, values) for (run, spec), values in pieces if spec is None]
            if received:
                success = iter(torch.cat([values for _, values in received]).tolist())
                for run, values in received:
                    run.success = [next(success) for _ in range(len(values))]
