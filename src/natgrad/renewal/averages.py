"""Sums that arrived become running averages."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.curvature import Spec
from natgrad.stacks.kept import diagonals
from natgrad.sums import Departed, Sums
from natgrad.trouble.guard import Watch


def fold(sums: Sums | Departed, watch: Watch, seed: int) -> Tensor | None:
    """Add what arrived to the running averages: E ← d E + (1 - d) fresh (SPEC 1).

    Blocks that nobody saw, and those whose sums are not finite, stay as they are; all of them in a spoilt step.

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
        stack.allocate_averages()
        arrived = [spec for spec in stack.statistics if spec.name in piece.sums]
        seen = piece.samples > 0
        finite = torch.stack([_finite(spec, piece.sums[spec.name]) for spec in arrived]).all(0)
        told = seen if sums.spoilt is None else seen & ~sums.spoilt.to(stack.device)
        fine = told & finite
        decay, restarting = stack.curvature.factor_decay, stack.restarting
        past = stack.outlived(sums.turns[id(stack)], blocks) if restarting else None
        stack.note(blocks, fine)
        for spec in arrived:
            fresh = piece.sums[spec.name]
            if past is not None and spec.name in restarting:
                # Summed over what was made before the last renewal, of which the new average is none.
                fresh = torch.where(past.view(-1, *[1] * (fresh.ndim - 1)), 0, fresh)
            average = stack.averages.read(spec.name, blocks).to(stack.dtype)
            divisor = (piece.samples if spec.mean == "samples" else piece.rows).clamp(min=1)
            old = 0.0 if spec.fresh else decay
            blend_(average, fresh, old, (1 - old) / divisor, fine)
            if stack.averages.narrow(spec.name):
                generator = torch.Generator(stack.device).manual_seed(seed)
                stack.averages.write(spec.name, blocks, average, generator)
        weights = {id(weight): weight for spec in arrived if (weight := stack.weight_of(spec.name)) is not None}
        for whole in weights.values():
            weight = whole[blocks]
            weight.copy_(torch.where(fine, decay * weight + (1 - decay), weight))
        stack.rungs.saw(blocks, fine, told & ~finite)
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
    torch.where(fine.view(broadcast), blended, average, out=average)


def _finite(spec: Spec, sums: Tensor) -> Tensor:
    # No entry of a sum of x xᵀ exceeds its diagonal (Cauchy-Schwarz), so the diagonal tells of all.
    return diagonals(sums, spec).sum(1).abs() < torch.inf
