"""Blocks of which a renewal would make the same: the factors A of layers that always read the same tensor.

Nothing needs to be known of how they came to be equal. Running averages are compared, to the last bit: the sums of
their diagonals, and where those are equal all of them, which costs nothing beside a decomposition. So it does not
matter what a checkpoint, a change of the model or other nodes have made of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from natgrad.stacks.blocks import Stack
from natgrad.stacks.kept import diagonals

if TYPE_CHECKING:
    from natgrad.renewal.renew import Job

# From this work on (a Cholesky inverse of side 32) a part is looked at.
_WORTH = 32.0**3


@dataclass(frozen=True)
class Source:
    """Whose result is that of another block too.

    Attributes:
        stack: The stack.
        block: The block.
        done: What becomes of each block of its job (`Job.done`).
    """

    stack: Stack
    block: int
    done: Mapping[int, float]


def find_equal(jobs: Sequence[Job]) -> None:
    """Tell jobs which of their blocks are to take over what is made of others (`Job.equal`).

    Args:
        jobs: This rank's. They are to be done in this order; the host waits for the device.
    """
    looked_at = [job for job in jobs if _is_worth(job)]
    if sum(job.stop - job.start for job in looked_at) < 2:
        return
    known: dict[Hashable, list[tuple[Job, int]]] = {}
    for (job, block), mark in zip(_blocks(looked_at), _marks(looked_at), strict=True):
        stack = job.stack
        kept = stack.averages.dtype, stack.allocate_held().dtype, stack.work_dtype, stack.device
        alike = known.setdefault((id(stack.curvature), stack.factor, job.part.name, *kept, mark), [])
        equal = next((other for other in alike if _are_equal((job, block), other)), None)
        if equal is None:
            alike.append((job, block))
        else:
            other, its = equal
            job.equal[block] = Source(other.stack, its, other.done)


def _is_worth(job: Job) -> bool:
    """Tell whether comparing may pay: a matrix that is not shared with other ranks, made of averages alone."""
    part = job.part
    alone = job.columns is None and not part.everywhere
    return alone and part.cost >= _WORTH and all(name in job.stack.averages for name in part.reads)


def _blocks(jobs: Sequence[Job]) -> Iterator[tuple[Job, int]]:
    return ((job, block) for job in jobs for block in range(job.start, job.stop))


def _marks(jobs: Sequence[Job]) -> Iterator[tuple[float, ...]]:
    """Yield a few numbers for each block that are equal where all that a part reads is; the host waits once."""
    sums = []
    for job in jobs:
        specs = (spec for spec in job.stack.statistics if spec.name in job.part.reads)
        for spec in specs:
            averages = diagonals(job.stack.averages[spec.name][job.start : job.stop], spec)
            sums.append(averages.sum(1, dtype=torch.promote_types(averages.dtype, torch.float32)))
    numbers = iter(torch.cat([own.to(sums[0]) for own in sums]).tolist())
    for job in jobs:
        rows = [[next(numbers) for _ in range(job.start, job.stop)] for _ in job.part.reads]
        yield from zip(*rows, strict=True)


def _are_equal(left: tuple[Job, int], right: tuple[Job, int]) -> bool:
    """Tell whether a part reads the same of two blocks, to the last bit."""
    (job, block), (other, its) = left, right
    part, stacks = job.part, ((job.stack, slice(block, block + 1)), (other.stack, slice(its, its + 1)))
    for name in part.reads:
        weights = [stack.weight_of(name) for stack, _ in stacks]
        compared = [stack.averages.read(name, blocks) for stack, blocks in stacks]
        one, another = (
            weight[blocks] for weight, (_, blocks) in zip(weights, stacks, strict=True) if weight is not None
        )
        if not (torch.equal(one, another) and torch.equal(*compared)):
            return False
    if not part.warm:
        return True
    before, last = (stack.before(part, blocks) for stack, blocks in stacks)
    if before is None or last is None:
        return before is last
    return all(torch.equal(before[name], last[name]) for name in before)
