"""Update the running averages with the sums of a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from natgrad.capture.sums import BlockSums, StatisticsBuffer
from natgrad.distributed import Communicator
from natgrad.linalg.device import known_all
from natgrad.preconditioner.guard.guard import FailureCounters
from natgrad.profiling import profiled
from natgrad.state.averages import allocate_averages, restarted_since, weight_of
from natgrad.state.tensors import along


def update_averages(
    sums: StatisticsBuffer, failure_counters: FailureCounters, runtime: Communicator | None = None
) -> list[Tensor]:
    """Update the running averages: E ← d E + (1 - d) fresh (Pauloski 2022, eq. 14 and 15).

    Blocks without samples and with non-finite sums stay unchanged. So do all blocks in a skipped step.

    With the `runtime` of the ranks (collective) deferred sums are this rank's, and so are the parts that they update.

    Returns:
        Which blocks were updated, for each group of blocks that arrived (device bools).
    """
    updated = []
    for piece in sums.arrived() if runtime is None else _with_all_counters(sums.arrived(), runtime):
        with profiled("average"):
            group, blocks = piece.group, piece.blocks
            seen, finite = piece.samples > 0, _finite(piece)
            counts = seen if sums.skip_step is None else seen & ~sums.skip_step.to(seen.device)
            fine = counts & finite
            allocate_averages(group)
            _average(piece, fine, sums.basis_version[id(group)])
            _correct(piece, fine)
            failure_counters.count_skipped_factors(group, blocks, seen & ~finite)
            updated.append(fine)
    return updated


def _with_all_counters(pieces: Iterable[BlockSums], runtime: Communicator) -> list[BlockSums]:
    """Return all sums, deferred ones with the counters of all ranks, and whether they are finite on all; collective."""
    found = list(pieces)
    own = [piece for piece in found if piece.group.role.assignment.sums == "later"]
    if own:
        numbers = [torch.stack([piece.samples, piece.rows, (~_finite(piece)).to(piece.rows.dtype)]) for piece in own]
        message = torch.cat([each.to(numbers[0].device).flatten() for each in numbers])
        runtime.sum_(message, "factors")
        parts = message.split([each.numel() for each in numbers])
        for piece, each, summed in zip(own, numbers, parts, strict=True):
            piece.samples, piece.rows, failed = summed.view_as(each).to(each).unbind()
            piece.finite = failed == 0
    return found


def _finite(piece: BlockSums) -> Tensor:
    """Return whether all sums of each block are finite ``[n]``."""
    if piece.finite is not None:
        return piece.finite
    totals = torch.stack([each.reshape(len(each), -1).sum(1) for each in piece.sums.values()])
    return totals.isfinite().all(0)  # a sum is finite only if all terms are


def _average(piece: BlockSums, fine: Tensor, basis_version: list[int]) -> None:
    """Update the averages of the blocks that are `fine`; `basis_version` is the version at which the sums began."""
    group, blocks = piece.group, piece.blocks
    decay, restarted = group.curvature.factor_decay, restarted_since(group, basis_version, blocks)
    all_fine = known_all(fine)
    for spec in group.statistics:
        if spec.name not in piece.sums:
            continue
        fresh, dims = piece.sums[spec.name], len(piece.sums[spec.name].shape) - 1
        if not all_fine:
            fresh.masked_fill_(along(~fine, dims), 0)
        if restarted is not None and spec.name in group.restarting:
            # These sums used the previous eigenvectors, so they do not belong to the new average.
            fresh.masked_fill_(along(restarted, dims), 0)
        share = (1 - decay) / (piece.samples if spec.per == "sample" else piece.rows).clamp(min=1)
        average = group.state.averages.read(spec.name, blocks).to(group.dtype)  # a view, unless it is narrow
        kept = torch.full_like(share, decay).masked_fill_(~fine, 1)
        average.mul_(along(kept, dims)).addcmul_(fresh, along(share, dims))
        if group.state.averages[spec.name].dtype.itemsize < 4:
            group.state.averages.write(spec.name, blocks, average)


def _correct(piece: BlockSums, fine: Tensor) -> None:
    """Update the bias corrections of the running averages."""
    decay = piece.group.curvature.factor_decay
    weights = [weight_of(piece.group, spec.name) for spec in piece.group.statistics if spec.name in piece.sums]
    for weight in {id(weight): weight for weight in weights if weight is not None}.values():
        before = weight[piece.blocks]
        weight[piece.blocks] = torch.where(fine, decay * before + (1 - decay), before)
