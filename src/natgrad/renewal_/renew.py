"""Statistics that arrived become running averages; running averages become what a solve needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from time import perf_counter

import torch
from torch import Tensor

from natgrad import triangle
from natgrad.blocks import Stack
from natgrad.curvature import Part, Spec
from natgrad.guard import Watch
from natgrad.kept import along, pack, packed_shape, unpack
from natgrad.linalg import tensor_on
from natgrad.placement import Layout, Plan, Runtime, narrower
from natgrad.precision import full_products
from natgrad.sums import Sums

# Decompositions gain nothing from batching matrices beyond this many elements, and would hold them all at once.
_BATCH = 2**18


def fold(sums: Sums, watch: Watch, seed: int) -> Tensor | None:
    """Add what arrived to the running averages: E ← d E + (1 - d) fresh (SPEC 1).

    Blocks that nobody saw, and those whose sums are not finite, stay as they are.

    Args:
        sums: The sums over all ranks.
        watch: Counts what was skipped.
        seed: Of the rounding to narrow dtypes; the same on all ranks, another at each step.

    Returns:
        Whether any block was renewed (a lazy bool), or None if there are no blocks.
    """
    renewed: Tensor | None = None
    for piece in sums.arrived():
        stack, blocks = piece.stack, piece.blocks
        weight = stack.allocate_averages()[blocks]
        seen = piece.samples > 0
        finite = torch.stack([_finite(spec, piece.sums[spec.name]) for spec in stack.statistics]).all(0)
        fine = seen & finite
        decay = stack.curvature.factor_decay
        generator = torch.Generator(stack.device).manual_seed(seed)
        for spec in stack.statistics:
            fresh = piece.sums[spec.name]
            average = stack.averages.read(spec.name, blocks).to(stack.dtype)
            divisor = (piece.samples if spec.mean == "samples" else piece.rows).clamp(min=1)
            blend_(average, fresh, decay, (1 - decay) / divisor, fine)
            if stack.averages.narrow(spec.name):
                stack.averages.write(spec.name, blocks, average, generator)
        weight.copy_(torch.where(fine, decay * weight + (1 - decay), weight))
        watch.saw_factors(stack, blocks, seen & ~finite)
        renewed = fine.any() if renewed is None else renewed | fine.any().to(renewed.device)
    return renewed


def blend_(average: Tensor, fresh: Tensor, decay: float, share: Tensor, fine: Tensor) -> None:
    """Set ``average`` to ``decay * average + share * fresh`` where `fine`, block by block.

    Args:
        average: ``[N, ...]``.
        fresh: ``[N, ...]``; anything, NaN too, where not `fine`.
        decay: The weight of the old.
        share: ``[N]``.
        fine: ``[N]`` (bool).
    """
    broadcast = (-1, *[1] * (average.ndim - 1))
    if fine.device.type == "cpu" and bool(fine.all()):
        average.mul_(decay).addcmul_(fresh, share.view(broadcast))
        return
    blended = torch.addcmul(average * decay, fresh, share.view(broadcast))
    average.copy_(torch.where(fine.view(broadcast), blended, average))


def _finite(spec: Spec, sums: Tensor) -> Tensor:
    # No entry of a sum of x xᵀ exceeds its diagonal (Cauchy-Schwarz), so the diagonal tells of all.
    if spec.symmetric:
        sums = triangle.diagonals(sums.reshape(-1, sums.shape[-1]), spec.shape[-1]).view(len(sums), -1)
    return sums.flatten(1).sum(1).isfinite()


@dataclass
class _Job:
    """A part of some neighbouring blocks of a stack, all on one owner; None: on every worker."""

    owner: int | None
    stack: Stack
    part: Part
    start: int
    stop: int

    def numel(self, spec: Spec) -> int:
        return (self.stop - self.start) * prod(packed_shape(spec))

    def read(self, spec: Spec) -> Tensor:
        return pack(self.stack.held.read(spec.name, slice(self.start, self.stop)), spec).reshape(-1)

    def write(self, spec: Spec, values: Tensor) -> None:
        whole = unpack(values.view(-1, *packed_shape(spec)), spec)
        self.stack.held.write(spec.name, slice(self.start, self.stop), whole)

    def run(self, damping: float) -> list[bool]:
        """Do the work into what is held; blocks that fail keep what they had."""
        size = sum(spec.numel for spec in self.part.writes)
        step = max(1, _BATCH // size)
        success: list[bool] = []
        held, started = self.stack.held, perf_counter()
        for start in range(self.start, self.stop, step):
            blocks = slice(start, min(start + step, self.stop))
            averages = self.stack.corrected(blocks, self.part.reads)
            with full_products(self.stack.device):
                written, fine = self.stack.curvature.renew(self.part.name, averages, damping)
            flags: list[bool] = fine.tolist()
            for spec, fresh in zip(self.part.writes, written, strict=True):
                if not all(flags):
                    fresh = torch.where(along(fine, len(spec.shape)), fresh, held.read(spec.name, blocks))  # noqa: PLW2901
                held.write(spec.name, blocks, fresh)
            success += flags
        members = [member for member in self.stack.members if self.start <= member.start < self.stop]
        self.stack.charge(members, perf_counter() - started)
        return success


def observed(stacks: list[Stack]) -> set[str]:
    """Return the keys of the layers with statistics; this waits for the device."""
    known = [stack for stack in stacks if stack.weight is not None]
    weights = [stack.weight for stack in known if stack.weight is not None]
    seen = iter(torch.cat([weight.to(weights[0]) for weight in weights]).tolist() if weights else [])
    blocks = [(stack, [next(seen) > 0 for _ in range(stack.size)]) for stack in known]
    return {member.layer.key for stack, own in blocks for member in stack.members if all(own[member.blocks])}


def renew(
    stacks: list[Stack],
    plan: Plan[str],
    runtime: Runtime,
    keys: Collection[str],
    damping: float,
    watch: Watch,
    wire: torch.dtype | None = None,
) -> bool:
    """Do all parts of some layers, each on its owner, and exchange the results among the workers.

    Args:
        stacks: All stacks.
        plan: The owner of each part.
        runtime: The ranks.
        keys: The layers, which have statistics; the same on every worker of theirs.
        damping: γ of this renewal.
        watch: Counts what failed.
        wire: The dtype in which matrices travel, if narrower than that in which they are held.

    Returns:
        Whether there was anything to do.
    """
    jobs = _jobs(stacks, plan, keys)
    success: list[list[bool]] = []
    for job in jobs:
        job.stack.allocate_held()
        mine = job.owner in (None, runtime.rank)
        success.append(job.run(damping) if mine else [False] * (job.stop - job.start))
    if plan.columns < runtime.ranks:
        success = _exchange(jobs, success, plan.column(runtime.rank), runtime, wire)
    for job, flags in zip(jobs, success, strict=True):
        job.stack.renewed(job.part.name, job.start, flags)
        watch.saw_decompositions(job.stack, job.part.name, job.start, flags)
    return bool(jobs)


def _jobs(stacks: list[Stack], plan: Plan[str], keys: Collection[str]) -> list[_Job]:
    """Return the jobs of the layers that this rank works for: neighbouring layers of one owner together."""
    jobs: list[_Job] = []
    for stack in stacks:
        if not stack.role.works:
            continue
        for part in stack.parts:
            for member in stack.members:
                if member.layer.key in keys:
                    owner = plan.seats[member.layer.key].owners[part.name]
                    _append(jobs, _Job(owner, stack, part, member.start, member.stop))
    return jobs


def _append(jobs: list[_Job], job: _Job) -> None:
    """Append `job`, or lengthen the last one by it where they are neighbours."""
    last = jobs[-1] if jobs else None
    if last and (last.owner, last.stack, last.part, last.stop) == (job.owner, job.stack, job.part, job.start):
        last.stop = job.stop
    else:
        jobs.append(job)


@dataclass
class _Parcel:
    """What one owner sends to all: matrices in the dtype of the wire, vectors and flags of success as they are."""

    owner: int
    device: torch.device
    layout: Layout
    jobs: list[int]
    matrices: list[tuple[_Job, Spec]]
    vectors: list[tuple[_Job, Spec]]

    def send(self, flags: list[float]) -> Tensor:
        """Return the message ``[1, size]``."""
        vectors = [job.read(spec) for job, spec in self.vectors]
        wide = torch.cat([*vectors, tensor_on(self.device, flags, self.layout.dtype)])
        message = self.layout.empty(1, self.device)
        self.layout.write(message, wide[None], [job.read(spec)[None] for job, spec in self.matrices])
        return message

    def receive(self, message: Tensor) -> list[float]:
        """Write what arrived into what is held, and return the flags of success."""
        wide, narrow = (numbers[0] for numbers in self.layout.read(message))
        for outputs, numbers in ((self.vectors, wide), (self.matrices, narrow)):
            sizes = [job.numel(spec) for job, spec in outputs]
            for (job, spec), values in zip(outputs, numbers[: sum(sizes)].split(sizes), strict=True):
                job.write(spec, values)
        flags: list[float] = wide[sum(job.numel(spec) for job, spec in self.vectors) :].tolist()
        return flags


def _exchange(
    jobs: list[_Job], success: list[list[bool]], workers: Sequence[int], runtime: Runtime, wire: torch.dtype | None
) -> list[list[bool]]:
    """Send each owner's results to all workers: one message an owner, device and dtypes, flags of success with it."""
    parcels = _parcels(jobs, wire)
    messages = []
    for parcel in parcels:
        flags = [float(flag) for index in parcel.jobs for flag in success[index]]
        mine = parcel.owner == runtime.rank
        message = parcel.send(flags) if mine else parcel.layout.empty(1, parcel.device)
        counted = len(flags) * parcel.layout.dtype.itemsize
        messages.append((parcel.owner, message, {"inverses": message.numel() - counted, "counters": counted}))
    runtime.broadcast_(messages, workers)
    result = list(success)
    for parcel, (_, message, _) in zip(parcels, messages, strict=True):
        if parcel.owner == runtime.rank and parcel.layout.lossless:
            continue
        arrived = iter(parcel.receive(message))
        for index in parcel.jobs:
            result[index] = [next(arrived) > 0 for _ in success[index]]
    return result


def _parcels(jobs: list[_Job], wire: torch.dtype | None) -> list[_Parcel]:
    groups: dict[tuple[int, torch.device, torch.dtype, torch.dtype], list[int]] = {}
    for index, job in enumerate(jobs):
        if job.owner is None:
            continue
        stack = job.stack
        travels = narrower(wire, stack.held.dtype)
        groups.setdefault((job.owner, stack.device, stack.work_dtype, travels), []).append(index)
    parcels = []
    for (owner, device, dtype, travels), indices in groups.items():
        outputs = [(jobs[index], spec) for index in indices for spec in jobs[index].part.writes]
        matrices = [output for output in outputs if len(output[1].shape) > 1]
        vectors = [output for output in outputs if len(output[1].shape) <= 1]
        flags = sum(jobs[index].stop - jobs[index].start for index in indices)
        wide, narrow = (sum(job.numel(spec) for job, spec in some) for some in (vectors, matrices))
        layout = Layout(wide=wide + flags, narrow=narrow, dtype=dtype, wire=travels)
        parcels.append(_Parcel(owner, device, layout, indices, matrices, vectors))
    return parcels
