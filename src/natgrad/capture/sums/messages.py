"""A message: the raw sums of some layers in one contiguous buffer, symmetric matrices as triangles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from natgrad.distributed import Work
from natgrad.linalg import tensor_on
from natgrad.specs import Statistic
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.tensors import packed_shape

# Of a layer's statistics: all, those that its curvature has from the inputs alone, or those that need a gradient.
Portion: TypeAlias = Literal["whole", "inputs", "rest"]

# By the layer's name: how much of the terms that its gradients were scaled by counts; what is not in it: all.
Shares: TypeAlias = Mapping[str, float]


@dataclass
class Piece:
    """Neighbouring layers of a group, and which of their statistics are meant.

    Attributes:
        group: The group.
        members: The layers.
        portion: Which statistics.
    """

    group: BlockGroup
    members: list[LayerBlocks]
    portion: Portion = "whole"

    @property
    def blocks(self) -> slice:
        """Which of the group's blocks."""
        return slice(self.members[0].start, self.members[-1].stop)

    @cached_property
    def specs(self) -> list[Statistic]:
        """The statistics."""
        return portion_of(self.group, self.portion)


@dataclass
class SampleCount:
    """What was added to the sums of one layer since the last step.

    Attributes:
        samples: Samples; a layer used several times in one backward pass sees the same samples each time.
        rows: Samples times positions, over all uses.
        beyond: Those of uses that saw more rows than the loss has terms (token losses), of whose masks it says nothing.
        task: The backward pass that came last.
        task_samples: The samples counted for that pass.
    """

    samples: int = 0
    rows: int = 0
    beyond: int = 0
    task: int | None = None
    task_samples: int = 0

    def known(self, task: int) -> int:
        """Return the samples counted for the backward pass `task`, if none came after it."""
        return self.task_samples if task == self.task else 0

    def count(self, task: int, samples: int, rows: int, *, beyond: bool) -> None:
        """Count one use in the backward pass `task`."""
        known = self.known(task)
        self.samples += max(0, samples - known)
        self.task, self.task_samples = task, max(samples, known)
        self.rows += rows
        self.beyond += rows if beyond else 0


@dataclass
class Arrived:
    """What has been summed for some blocks of a group.

    Attributes:
        group: The group.
        blocks: Which of its N blocks.
        sums: A tensor ``[n, *packed_shape(spec)]`` for each statistic.
        samples: ``[n]``.
        rows: Samples times positions ``[n]``.
    """

    group: BlockGroup
    blocks: slice
    sums: dict[str, Tensor]
    samples: Tensor
    rows: Tensor


class Bucket:
    """Sums that travel together in one buffer, with counters at its end: samples and rows of each layer.

    Attributes:
        pieces: Its layers.
        places: In which piece each is.
        role: What this rank has to do with all of its layers.
        kind: What its sums are counted as.
    """

    def __init__(self, pieces: list[Piece], kind: str = "factors") -> None:
        """Lay out neighbouring layers of some groups with the same role; no tensor is made.

        Args:
            pieces: The layers.
            kind: What its sums are counted as.
        """
        self.pieces, self.role, self.kind = pieces, pieces[0].group.role, kind
        self.places = {member.layer.name: index for index, piece in enumerate(pieces) for member in piece.members}
        self._counters = 2 * len(self.places)
        self.numel = self._counters + sum(
            (piece.blocks.stop - piece.blocks.start) * prod(packed_shape(spec))
            for piece in pieces
            for spec in piece.specs
        )
        self.buffer: Tensor | None = None
        self.views: dict[str, dict[str, Tensor]] = {}
        self._stacked: list[dict[str, Tensor]] = []

    def allocate(self) -> Tensor:
        """Make the buffer, of uninitialised memory, and cut it into views; or return the one there is."""
        if self.buffer is not None:
            return self.buffer
        first = self.pieces[0].group
        self.buffer = torch.empty(self.numel, dtype=first.dtype, device=first.device)
        offset = 0
        for index, piece in enumerate(self.pieces):
            size, tensors = piece.blocks.stop - piece.blocks.start, {}
            for spec in piece.specs:
                shape = (size, *packed_shape(spec))
                end = offset + prod(shape)
                tensors[spec.name] = self.buffer[offset:end].view(shape)
                offset = end
            self._stacked.append(tensors)
            for member in piece.members:
                self.views[member.layer.name] = self.stacked(index, member.blocks)
        return self.buffer

    def stacked(self, index: int, blocks: slice) -> dict[str, Tensor]:
        """Return the sums of some of the group's blocks that are in one piece."""
        start = self.pieces[index].blocks.start
        own = slice(blocks.start - start, blocks.stop - start)
        return {name: tensor[own] for name, tensor in self._stacked[index].items()}

    def halves(self) -> tuple[Tensor, Tensor]:
        """Return the sums and the counters, as vectors."""
        sums, counters = self.allocate().split([self.numel - self._counters, self._counters])
        return sums, counters

    @property
    def kinds(self) -> dict[str, int]:
        """How many of its elements are of which kind."""
        return {self.kind: self.numel - self._counters, "counters": self._counters}

    def arrived(self) -> Iterator[Arrived]:
        """Yield the sums of each piece, with the counters."""
        assert self.buffer is not None
        counters, counted = self.buffer[self.numel - self._counters :].view(-1, 2), 0
        for index, piece in enumerate(self.pieces):
            blocks, sums = piece.blocks, self.stacked(index, piece.blocks)
            own = counters[counted : counted + len(piece.members)]
            counted += len(piece.members)
            size = blocks.stop - blocks.start
            if size != len(piece.members):
                repeats = tensor_on(own.device, [member.stop - member.start for member in piece.members])
                own = own.repeat_interleave(repeats, dim=0, output_size=size)
            yield Arrived(piece.group, blocks, sums, own[:, 0], own[:, 1])

    def release(self) -> None:
        """Drop the buffer."""
        self.buffer = None
        self.views.clear()
        self._stacked.clear()

    def give(self) -> Bucket:
        """Return a message that has the buffer from now on, in place of this one."""
        given = copy(self)
        self.buffer, self.views, self._stacked = None, {}, []
        return given

    def take_back(self, given: Bucket) -> None:
        """Take the buffer of what `give` has returned, or add it to the one there is."""
        assert given.buffer is not None
        if self.buffer is None:
            self.buffer, self.views, self._stacked = given.buffer, given.views, given._stacked
        else:
            self.buffer.add_(given.buffer)

    def rescale(self, before: float | Tensor, gain: float | Tensor) -> None:
        """Replace the factor of gradients in sums that were closed with the one `before`."""
        if isinstance(before, float) and isinstance(gain, float) and before == gain:
            return
        for piece in self.pieces:
            for member in piece.members:
                _correct(piece, self.views[member.layer.name], gain / before, {}, seen=True)

    def close(self, tallies: Mapping[str, SampleCount], shares: Shares, gain: float | Tensor) -> Tensor:
        """Make it ready to travel, and return the buffer: see `StatisticsBuffer.close`."""
        buffer = self.allocate()
        counters: list[float] = []
        for name, index in self.places.items():
            tally, share = tallies[name], shares.get(name, 1.0)
            rows = tally.beyond + (tally.rows - tally.beyond) * min(share, 1.0)
            own = {"sample": share, "position": rows / max(1, tally.rows)}
            _correct(self.pieces[index], self.views[name], gain * share, own, seen=tally.rows > 0)
            counters += [tally.samples * share, rows]
        if self._counters:
            buffer[self.numel - len(counters) : self.numel] = tensor_on(buffer.device, counters, buffer.dtype)
        return buffer


class Departed:
    """Messages under way beside the passes that fill the next ones.

    Attributes:
        skip_step: See `StatisticsBuffer`.
        basis_version: See `StatisticsBuffer`.
    """

    def __init__(
        self,
        messages: list[Bucket],
        posted: list[Work],
        skip_step: Tensor | None,
        basis_version: dict[int, list[int]],
    ) -> None:
        """Wrap `messages` and what they were `posted` as."""
        self._messages, self._posted, self.skip_step, self.basis_version = messages, posted, skip_step, basis_version

    @property
    def whole(self) -> bool:
        """Whether they arrive without this rank sending anything more."""
        return all(posted.whole for posted in self._posted)

    def arrived(self) -> Iterator[Arrived]:
        """Wait, and yield the sums; of a model that was moved meanwhile they are moved too."""
        for message, posted in zip(self._messages, self._posted, strict=True):
            posted.wait()
            for piece in message.arrived():
                place = piece.group.device, piece.group.dtype
                sums = {name: tensor.to(*place) for name, tensor in piece.sums.items()}
                yield replace(piece, sums=sums, samples=piece.samples.to(*place), rows=piece.rows.to(*place))
            message.release()


def portion_of(group: BlockGroup, portion: Portion) -> list[Statistic]:
    """Return some of the statistics of a group."""
    early = group.input_statistics
    return [spec for spec in group.statistics if portion == "whole" or (spec.name in early) == (portion == "inputs")]


def neighbours(layers: Iterable[tuple[BlockGroup, LayerBlocks, Portion]]) -> list[Piece]:
    """Return layers as runs of those that follow each other in their groups."""
    groups: dict[tuple[int, Portion], list[Piece]] = {}
    for group, member, portion in layers:
        groups.setdefault((id(group), portion), []).append(Piece(group, [member], portion))
    pieces: list[Piece] = []
    for runs in groups.values():
        pieces.append(Piece(runs[0].group, [], runs[0].portion))
        for run in sorted(runs, key=lambda run: run.blocks.start):
            last = pieces[-1]
            if last.members and last.blocks.stop != run.blocks.start:
                pieces.append(run)
            else:
                last.members += run.members
    return pieces


def _correct(
    piece: Piece, views: dict[str, Tensor], factor: float | Tensor, shares: Mapping[str, float], *, seen: bool
) -> None:
    """Multiply the gradients in a layer's sums by `factor`, counts by the share that their divisor is multiplied by.

    A layer not seen gets zeros.
    """
    plain = _drawn(piece.group) or (isinstance(factor, float) and factor == 1.0)
    for spec in piece.specs:
        if not seen:
            views[spec.name].zero_()
        elif spec.gradient_power and not plain:
            views[spec.name].mul_(factor**spec.gradient_power)
        elif spec.counts_positions and shares:
            views[spec.name].mul_(shares[spec.per])


def _drawn(group: BlockGroup) -> bool:
    """Return whether labels are sampled, which know nothing of the loss, its scale and its mean."""
    return group.curvature.likelihood is not None
