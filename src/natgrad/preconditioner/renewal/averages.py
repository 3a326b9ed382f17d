"""Update the running averages with the sums of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.capture.sums import BlockSums, StatisticsBuffer
from natgrad.linalg.device import known_all
from natgrad.linalg.joined import joined, parted, together, write_
from natgrad.preconditioner.guard.guard import FailureCounters, Trouble
from natgrad.specs import Statistic
from natgrad.state.failures import FailureState
from natgrad.state.tensors import along, diagonals


def fold(sums: StatisticsBuffer, watch: FailureCounters, seed: int) -> Tensor | None:
    """Update the running averages: E ← d E + (1 - d) fresh (Pauloski 2022, eq. 14 and 15).

    Blocks without samples and blocks with non-finite sums stay unchanged. So do all blocks if the GradScaler skips the
    step.

    Args:
        sums: The sums over all ranks.
        watch: Counts blocks with non-finite sums.
        seed: Seed of the stochastic rounding to narrow dtypes: equal on all ranks, different in each step.

    Returns:
        Whether any block was updated (device bool). None if there are no blocks.
    """
    renewed: Tensor | None = None
    for pieces in together(sums.arrived(), _place, _nbytes):
        samples = [piece.samples for piece in pieces]
        seen, finite = joined(samples) > 0, _finite(pieces)
        told = seen if sums.skip_step is None else seen & ~sums.skip_step.to(seen.device)
        fine = told & finite
        _average(pieces, parted(fine, samples), sums, seed)
        FailureState.record_statistics([(piece.group.failures, piece.blocks) for piece in pieces], fine, told & ~finite)
        bad = parted(seen & ~finite, samples)
        watch.saw_factors([Trouble(one.group, one.blocks, own) for one, own in zip(pieces, bad, strict=True)])
        renewed = fine.any() if renewed is None else renewed | fine.any().to(renewed.device)
    return renewed


def _place(piece: BlockSums) -> tuple[torch.device, object]:
    return piece.samples.device, (piece.samples.dtype, piece.group.curvature.factor_decay, len(_specs(piece)))


def _nbytes(piece: BlockSums) -> int:
    return 2 * sum(own.nbytes for own in piece.sums.values())  # the sums, and the updated averages


def _specs(piece: BlockSums) -> list[Statistic]:
    return [spec for spec in piece.group.statistics if spec.name in piece.sums]


def _finite(pieces: Sequence[BlockSums]) -> Tensor:
    """Return whether all sums of each block are finite, for pieces with equally many statistics, end to end."""
    # No entry of a sum of x xᵀ exceeds its diagonal (Cauchy-Schwarz), so the diagonal tells of all.
    traces = [[diagonals(piece.sums[spec.name], spec).sum(1) for spec in _specs(piece)] for piece in pieces]
    every = joined([own for column in zip(*traces, strict=True) for own in column])
    return (every.abs() < torch.inf).view(len(traces[0]), -1).all(0)


@dataclass(frozen=True)
class _Update:
    """The update of a running average ``[n, ...]``: `decay` times the old one plus `share` ``[n]`` times `fresh`."""

    piece: BlockSums
    spec: Statistic
    fresh: Tensor
    decay: float
    share: Tensor
    fine: Tensor

    @property
    def average(self) -> Tensor:
        """The running average in the dtype of sums: a view if it is kept in that dtype."""
        group = self.piece.group
        return group.averages.read(self.spec.name, self.piece.blocks).to(group.dtype)

    @property
    def narrow(self) -> bool:
        """Whether it is kept in a narrower dtype than it is updated in."""
        return self.piece.group.averages.narrow(self.spec.name)

    def write(self, average: Tensor, seed: int) -> None:
        """Store an average that is not a view."""
        generator = torch.Generator(average.device).manual_seed(seed)
        self.piece.group.averages.write(self.spec.name, self.piece.blocks, average, generator)


def _average(pieces: Sequence[BlockSums], fine: Sequence[Tensor], sums: StatisticsBuffer, seed: int) -> None:
    """Update the averages of similar pieces and their bias corrections, for the blocks that are `fine`."""
    decay = pieces[0].group.curvature.factor_decay
    shares: dict[tuple[str, float], list[Tensor]] = {}
    updates: list[_Update] = []
    for index, (piece, own) in enumerate(zip(pieces, fine, strict=True)):
        group, blocks, restarting = piece.group, piece.blocks, piece.group.restarting
        group.allocate_averages()
        group.note(blocks, own)
        past = group.restarted_since(sums.basis_version[id(group)], blocks) if restarting else None
        for spec in _specs(piece):
            fresh = piece.sums[spec.name]
            if past is not None and spec.name in restarting:
                # These sums used the previous eigenvectors, so they do not belong to the new average.
                fresh = torch.where(along(past, fresh.ndim - 1), 0, fresh)
            old = decay if spec.decayed else 0.0
            if (spec.per, old) not in shares:
                counts = [one.samples if spec.per == "sample" else one.rows for one in pieces]
                shares[spec.per, old] = parted((1 - old) / joined(counts).clamp(min=1), counts)
            updates.append(_Update(piece, spec, fresh, old, shares[spec.per, old][index], own))
    _blend(updates, seed)
    _correct(pieces, fine, decay)


def _blend(updates: Sequence[_Update], seed: int) -> None:
    """Update running averages in place. Blocks that are not fine stay unchanged, whatever their fresh values."""
    for own in updates:
        average, dims = own.average, own.fresh.ndim - 1
        if known_all(own.fine):
            average.mul_(own.decay).addcmul_(own.fresh, along(own.share, dims))
        else:
            renewed = (average * own.decay).addcmul_(own.fresh, along(own.share, dims))
            torch.where(along(own.fine, dims), renewed, average, out=average)
        if own.narrow:
            own.write(average, seed)


def _correct(pieces: Sequence[BlockSums], fine: Sequence[Tensor], decay: float) -> None:
    """Update the bias corrections of running averages."""
    places: list[tuple[Tensor, slice | Tensor]] = []
    which = []
    for piece, own in zip(pieces, fine, strict=True):
        weights = (piece.group.weight_of(spec.name) for spec in _specs(piece))
        for weight in {id(weight): weight for weight in weights if weight is not None}.values():
            places.append((weight, piece.blocks))
            which.append(own)
    before = joined([weight[blocks] for weight, blocks in places])
    write_(places, torch.where(joined(which), decay * before + (1 - decay), before))
