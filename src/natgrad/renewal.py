"""Statistics that arrived become running averages; running averages become what a solve needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad import gram
from natgrad.blocks import Stack
from natgrad.curvature import Part, Spec
from natgrad.guard import Watch
from natgrad.placement import Plan, Runtime, flatten, unflatten
from natgrad.sums import Sums

# Decompositions gain nothing from batching matrices beyond this many elements, and would hold them all at once.
_BATCH = 2**18


def fold(sums: Sums, watch: Watch) -> Tensor | None:
    """Add what arrived to the running averages: E ← d E + (1 - d) fresh (SPEC 1).

    Blocks that nobody saw, and those whose sums are not finite, stay as they are.

    Args:
        sums: The sums over all ranks.
        watch: Counts what was skipped.

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
        for spec in stack.statistics:
            fresh, average = piece.sums[spec.name], stack.averages[spec.name][blocks]
            if spec.symmetric:
                gram.symmetrize_(fresh)
            divisor = (piece.samples if spec.mean == "samples" else piece.rows).clamp(min=1)
            blend_(average, fresh, decay, (1 - decay) / divisor, fine)
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
    values = sums.diagonal(dim1=-2, dim2=-1) if spec.symmetric else sums.flatten(1)
    return values.sum(-1).isfinite()


@dataclass
class _Job:
    """A part of some neighbouring blocks of a stack, all on one owner."""

    owner: int
    stack: Stack
    part: Part
    start: int
    stop: int

    def outputs(self) -> list[Tensor]:
        return [self.stack.held[spec.name][self.start : self.stop] for spec in self.part.writes]

    def run(self, damping: float) -> list[bool]:
        """Do the work into what is held; blocks that fail keep what they had."""
        size = sum(spec.numel for spec in self.part.writes)
        step = max(1, _BATCH // size)
        success: list[bool] = []
        for start in range(self.start, self.stop, step):
            blocks = slice(start, min(start + step, self.stop))
            averages = self.stack.corrected(blocks, self.part.reads)
            written, fine = self.stack.curvature.renew(self.part.name, averages, damping)
            flags: list[bool] = fine.tolist()
            for spec, fresh in zip(self.part.writes, written, strict=True):
                held = self.stack.held[spec.name][blocks]
                held.copy_(fresh if all(flags) else torch.where(fine.view(-1, *[1] * len(spec.shape)), fresh, held))
            success += flags
        return success


def renew(stacks: list[Stack], plan: Plan[tuple[str, str]], runtime: Runtime, damping: float, watch: Watch) -> bool:
    """Do all parts, each on its owner, and exchange the results.

    Args:
        stacks: All stacks.
        plan: The owner of each part, keyed by layer key and part name.
        runtime: The ranks.
        damping: γ of this renewal.
        watch: Counts what failed.

    Returns:
        Whether there was anything to do: the same on every rank.
    """
    jobs = _jobs(stacks, plan)
    success: list[list[bool]] = []
    for job in jobs:
        job.stack.allocate_held()
        success.append(job.run(damping) if job.owner == runtime.rank else [False] * (job.stop - job.start))
    if runtime.ranks > 1:
        success = _exchange(jobs, success, runtime)
    for job, flags in zip(jobs, success, strict=True):
        job.stack.renewed(job.part.name, job.start, flags)
        watch.saw_decompositions(job.stack, job.part.name, job.start, flags)
    return bool(jobs)


def _jobs(stacks: list[Stack], plan: Plan[tuple[str, str]]) -> list[_Job]:
    """Return all jobs: neighbouring layers of one owner together, layers never seen left out."""
    weights = [stack.weight for stack in stacks if stack.weight is not None]
    if not weights:
        return []
    seen = iter(torch.cat([weight.to(weights[0]) for weight in weights]).tolist())
    jobs: list[_Job] = []
    for stack in stacks:
        known = [next(seen) > 0 for _ in range(stack.size)] if stack.weight is not None else [False] * stack.size
        for part in stack.parts:
            for member in stack.members:
                if all(known[member.blocks]):
                    owner = plan.owners[member.layer.key, part.name]
                    _append(jobs, _Job(owner, stack, part, member.start, member.stop))
    return jobs


def _append(jobs: list[_Job], job: _Job) -> None:
    """Append `job`, or lengthen the last one by it where they are neighbours."""
    last = jobs[-1] if jobs else None
    if last and (last.owner, last.stack, last.part, last.stop) == (job.owner, job.stack, job.part, job.start):
        last.stop = job.stop
    else:
        jobs.append(job)


def _exchange(jobs: list[_Job], success: list[list[bool]], runtime: Runtime) -> list[list[bool]]:
    """Send each owner's results to all: one message an owner, dtype and device, flags of success at its end."""
    groups: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    for index, job in enumerate(jobs):
        groups.setdefault((job.owner, job.stack.solve_dtype, job.stack.device), []).append(index)
    messages = []
    for (owner, dtype, device), indices in groups.items():
        flags = torch.tensor([float(flag) for index in indices for flag in success[index]], dtype=dtype, device=device)
        pieces = [piece for index in indices for piece in jobs[index].outputs()]
        if owner == runtime.rank:
            message = flatten([*pieces, flags])
        else:
            message = torch.empty(sum(map(torch.Tensor.numel, pieces)) + len(flags), dtype=dtype, device=device)
        messages.append((owner, message, {"inverses": message.numel() - len(flags), "counters": len(flags)}))
    runtime.broadcast_(messages)
    result = list(success)
    for (owner, _, _), indices, (_, message, kinds) in zip(groups, groups.values(), messages, strict=True):
        if owner == runtime.rank:
            continue
        pieces = [piece for index in indices for piece in jobs[index].outputs()]
        torch._foreach_copy_(pieces, unflatten(message[: kinds["inverses"]], pieces))
        arrived = iter(message[kinds["inverses"] :].tolist())
        for index in indices:
            result[index] = [next(arrived) > 0 for _ in success[index]]
    return result
