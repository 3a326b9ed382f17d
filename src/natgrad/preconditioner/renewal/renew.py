"""Renew inverses or eigenvectors from running averages: each task on its owner, the results to all workers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from time import perf_counter

import torch
from torch import Tensor

from natgrad.curvature import Curvature
from natgrad.distributed import Communicator, Plan, narrower
from natgrad.errors import NatgradError
from natgrad.linalg import tensor_on, triangle
from natgrad.linalg.products import full_products
from natgrad.preconditioner.guard.guard import FailureCounters
from natgrad.refresh.rule import READS, Reads, side_of
from natgrad.specs import Task, TensorSpec
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.tensors import along, pack, packed_shape, unpack

# Batches of more elements would not speed up decompositions, and would need more memory.
_BATCH = 2**18

RAISED = -1.0


@dataclass
class Job:
    """A task for some neighbouring blocks of a group, on one owner; None: on every worker.

    Attributes:
        done: The result of each block: above 0 if it succeeded.
    """

    owner: int | None
    group: BlockGroup
    task: Task
    start: int
    stop: int
    done: dict[int, float] = field(default_factory=dict)

    def numel(self, spec: TensorSpec) -> int:
        """Return the number of elements that are sent of a tensor that the task writes."""
        return (self.stop - self.start) * prod(packed_shape(spec))

    def read(self, spec: TensorSpec) -> Tensor:
        """Return a tensor that the task wrote, as it is sent ``[numel(spec)]``."""
        held = self.group.results.read(spec.name, slice(self.start, self.stop))
        return pack(held, spec).reshape(-1)

    def write(self, spec: TensorSpec, values: Tensor) -> None:
        """Store a received tensor."""
        whole = unpack(values.view(-1, *packed_shape(spec)), spec)
        self.group.results.write(spec.name, slice(self.start, self.stop), whole)

    @property
    def members(self) -> list[LayerBlocks]:
        """The layers."""
        return [member for member in self.group.members if self.start <= member.start < self.stop]

    def pieces(self) -> Iterator[slice]:
        """Yield the blocks that are decomposed together."""
        whole = set(self.task.reads) - set(self.task.diagonal_of)
        read = sum(spec.numel for spec in self.group.statistics if spec.name in whole)
        step = max(1, _BATCH // max(read, sum(spec.numel for spec in self.task.writes)))
        good = self.group.good[self.task.name]
        start = self.start
        for stop in range(self.start + 1, self.stop + 1):
            # Blocks with a last result to start from are separate from those without.
            ends = stop == self.stop or stop - start == step
            if ends or (self.task.needs_previous and good[stop] != good[start]):
                yield slice(start, stop)
                start = stop

    def run(self, damping: float) -> list[float]:
        """Run the task, store its results and return the result of each block. Failed blocks keep their old result."""
        started = perf_counter()
        for blocks in self.pieces():
            self._renew(blocks, damping * self.group.factor)
        self.group.charge(self.members, perf_counter() - started)
        return self.success

    def _renew(self, blocks: slice, damping: float) -> None:
        group, task = self.group, self.task
        averages = group.corrected(blocks, task.reads, task.diagonal_of)
        with full_products(group.device):
            written, fine = compute(group.curvature, task, averages, damping, group.previous(task, blocks))
        flags = self.keep(blocks, written, fine)
        self.done.update(zip(range(blocks.start, blocks.stop), map(float, flags), strict=True))

    @property
    def success(self) -> list[float]:
        """The result of each block, once all are done."""
        return [self.done[block] for block in range(self.start, self.stop)]

    def keep(self, blocks: slice, written: Mapping[str, Tensor], fine: Tensor) -> list[bool]:
        """Store the results of some blocks where they are `fine`, and return these flags."""
        held, flags = self.group.results, [bool(flag) for flag in fine.tolist()]
        for spec in self.task.writes:
            before, fresh = held.read(spec.name, blocks), written[spec.name]
            if not all(flags):
                fresh = torch.where(along(fine, len(spec.shape)), fresh, before)
            held.write(spec.name, blocks, fresh)
            if spec.symmetric:
                # Other ranks only receive the lower triangle, and all ranks must hold the same bits.
                triangle.mirror_(held[spec.name][blocks])
        return flags


def compute(
    curvature: Curvature,
    task: Task,
    averages: Mapping[str, Tensor],
    damping: float,
    previous: Mapping[str, Tensor] | None,
    rows: int = 0,
) -> tuple[dict[str, Tensor], Tensor]:
    """Call `Curvature.compute`. A task that writes nothing always succeeds.

    Args:
        curvature: The curvature.
        task: Its task.
        averages: What the task reads.
        damping: γ of this renewal.
        previous: What it has written last.
        rows: How many rows there are, where statistics are gathered.

    Raises:
        NatgradError: if a tensor that the task writes is missing or of another shape.
    """
    if not task.writes:
        first = next(iter(averages.values()))
        return {}, torch.ones(len(first), dtype=torch.bool, device=first.device)
    written, fine = curvature.compute(task.name, averages, damping, previous)
    for spec in task.writes:
        wanted = len(fine), *spec.sized(rows).shape
        found = written[spec.name].shape if spec.name in written else "nothing"
        if found != wanted:
            call = f"compute({task.name!r}) of {curvature!r}"
            raise NatgradError(f"{call} has returned {found} as {spec.name!r}, not a tensor of {wanted}")
    return written, fine


def observed(groups: list[BlockGroup]) -> set[str]:
    """Return the keys of the layers with statistics. Waits for the device."""
    known = [group for group in groups if group.weight is not None]
    weights = [torch.stack(group.weights).amin(0) for group in known]
    seen = iter(torch.cat([weight.to(weights[0]) for weight in weights]).tolist() if weights else [])
    blocks = [(group, [next(seen) > 0 for _ in range(group.size)]) for group in known]
    return {member.layer.key for group, own in blocks for member in group.members if all(own[member.blocks])}


def renew(
    groups: list[BlockGroup],
    plan: Plan[str],
    runtime: Communicator,
    keys: Collection[str],
    kept: Collection[tuple[str, str]],
    damping: float,
    watch: FailureCounters,
    wire: torch.dtype | None = None,
    *,
    reads: Collection[Reads] = READS,
    replayed: bool = False,
) -> bool:
    """Run the tasks of some layers, each on its owner, and exchange the results among the workers.

    Args:
        groups: All groups.
        plan: The owner of each task.
        runtime: The ranks.
        keys: The layers, which have statistics; the same on all their workers.
        kept: The tasks that are not run: pairs of layer key and task name.
        damping: γ of this renewal.
        watch: Counts failures.
        wire: The dtype in which matrices are sent, if narrower than that in which they are held.
        reads: Run only tasks that read statistics of inputs, of gradients, or of both.
        replayed: Run only tasks that use the second pass over the batch.

    Returns:
        Whether there was anything to do.
    """
    jobs = jobs_of(groups, plan, keys, kept=kept, reads=reads, replayed=replayed)
    success: list[list[float]] = []
    for job in jobs:
        job.group.allocate_results()
        mine = job.owner in (None, runtime.rank)
        success.append(job.run(damping) if mine else [0.0] * (job.stop - job.start))
    conclude(jobs, success, plan.column(runtime.rank), runtime, watch, wire)
    return bool(jobs)


def conclude(
    jobs: list[Job],
    success: list[list[float]],
    workers: Sequence[int],
    runtime: Communicator,
    watch: FailureCounters,
    wire: torch.dtype | None,
) -> list[Job]:
    """End a renewal: exchange the results of its jobs, and record which layers have curvature now.

    Args:
        jobs: The jobs, the same on all `workers`.
        success: For each block of each job of this rank: above 0 if it succeeded, `RAISED` if the owner raised an
            error other than a failed decomposition.
        workers: The ranks that exchange.
        runtime: The ranks.
        watch: Counts failures.
        wire: As in `renew`.

    Returns:
        The jobs that were stopped by an error.
    """
    if len(workers) > 1:
        success = _exchange(jobs, success, workers, runtime, wire)
    for job, numbers in zip(jobs, success, strict=True):
        flags = [number > 0 for number in numbers]
        job.group.renewed(job.task.name, job.start, flags)
        job.group.restart(job.task, job.start, flags)
        watch.saw_decompositions(job.group, job.task.name, job.start, flags)
    for group in {id(job.group): job.group for job in jobs}.values():
        group.failures.conclude(block for job in jobs if job.group is group for block in range(job.start, job.stop))
    return [job for job, numbers in zip(jobs, success, strict=True) if RAISED in numbers]


def jobs_of(
    groups: list[BlockGroup],
    plan: Plan[str],
    keys: Collection[str],
    *,
    kept: Collection[tuple[str, str]] = (),
    reads: Collection[Reads] = READS,
    replayed: bool = False,
) -> list[Job]:
    """Return the jobs of the layers that this rank is a worker of, joining neighbouring layers of one owner.

    Tasks with `Task.after_replay` are run by a renewal the first time, and by replays afterwards.
    """
    jobs: list[Job] = []
    for group in groups:
        if not group.role.is_gradient_worker or group.gathered:
            continue
        for task in group.tasks:
            if side_of(task.reads, group.input_statistics) not in reads:
                continue
            for member in group.members:
                begun = task.after_replay and all(group.good[task.name][member.blocks])
                due = member.layer.key in keys and (member.layer.key, task.name) not in kept
                if due and begun == replayed:
                    owner = plan.seats[member.layer.key].owners[task.name]
                    _append(jobs, Job(owner, group, task, member.start, member.stop))
    return jobs


def _append(jobs: list[Job], job: Job) -> None:
    """Append `job`, or join it with the last job if they are neighbours."""
    last = jobs[-1] if jobs else None
    if last and (last.owner, last.group, last.task, last.stop) == (job.owner, job.group, job.task, job.start):
        last.stop = job.stop
    else:
        jobs.append(job)


@dataclass
class _Bucket:
    """The results of one device and dtype: those of each owner, flat, and whether each block succeeded.

    Attributes:
        device: The device.
        dtype: The dtype of decompositions.
        wire: The dtype in which matrices are sent.
        jobs: The jobs of each worker.
    """

    device: torch.device
    dtype: torch.dtype
    wire: torch.dtype
    jobs: list[list[int]]

    def travels_narrow(self, spec: TensorSpec) -> bool:
        """Return whether a tensor is sent in the dtype of the wire. Vectors never are."""
        return self.wire == self.dtype or len(spec.shape) > 1


def _exchange(
    jobs: list[Job], success: list[list[float]], workers: Sequence[int], runtime: Communicator, wire: torch.dtype | None
) -> list[list[float]]:
    """Send each owner's results to all workers, and return whether each block of each job succeeded."""
    result = list(success)
    runtime.subgroup(workers)  # collective on all ranks, also if some columns have nothing to share yet
    for bucket in _buckets(jobs, workers, wire):
        empty = torch.empty(0, dtype=bucket.dtype, device=bucket.device)
        sizes, outputs = [], []
        for indices in bucket.jobs:
            written = [(jobs[index], spec) for index in indices for spec in jobs[index].task.writes]
            narrow = [output for output in written if bucket.travels_narrow(output[1])]
            wide = [output for output in written if not bucket.travels_narrow(output[1])]
            flags = sum(jobs[index].stop - jobs[index].start for index in indices)
            sizes.append((sum(map(_numel, narrow)), sum(map(_numel, wide)) + flags))
            outputs.append((narrow, wide))
        place = workers.index(runtime.rank)
        narrow, wide = outputs[place]
        flags_now = [flag for index in bucket.jobs[place] for flag in success[index]]
        values = torch.cat([empty, *(job.read(spec).to(bucket.dtype) for job, spec in narrow)])
        counters = torch.cat(
            [
                *(job.read(spec).to(bucket.dtype) for job, spec in wide),
                tensor_on(bucket.device, flags_now, bucket.dtype),
            ]
        )
        shared = runtime.share_from_owners((values, counters), sizes, "inverses", ranks=workers, wire=bucket.wire)
        for index, (numbers, (narrow, wide), indices) in enumerate(zip(shared, outputs, bucket.jobs, strict=True)):
            if index == place and bucket.wire == bucket.dtype:
                continue  # they have not changed
            _write(narrow, numbers[0])
            _write(wide, numbers[1])
            told = iter(numbers[1][sum(map(_numel, wide)) :].tolist())
            for job in indices:
                result[job] = [next(told) for _ in success[job]]
    return result


def _numel(output: tuple[Job, TensorSpec]) -> int:
    job, spec = output
    return job.numel(spec)


def _write(outputs: Sequence[tuple[Job, TensorSpec]], numbers: Tensor) -> None:
    """Store received tensors."""
    sizes = list(map(_numel, outputs))
    for (job, spec), values in zip(outputs, numbers[: sum(sizes)].split(sizes), strict=True):
        job.write(spec, values)


def _buckets(jobs: list[Job], workers: Sequence[int], wire: torch.dtype | None) -> list[_Bucket]:
    found: dict[tuple[torch.device, torch.dtype, torch.dtype], _Bucket] = {}
    for index, job in enumerate(jobs):
        if job.owner is None:
            continue
        group = job.group
        travels = narrower(wire, group.results.dtype)
        kind = group.device, group.work_dtype, narrower(travels, group.work_dtype)
        bucket = found.setdefault(kind, _Bucket(*kind, [[] for _ in workers]))
        bucket.jobs[workers.index(job.owner)].append(index)
    return list(found.values())
