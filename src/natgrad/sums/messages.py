"""A message: the raw sums of some layers in one contiguous buffer, symmetric matrices as triangles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from natgrad.blocks import Member, Stack
from natgrad.kept import packed_shape
from natgrad.linalg import tensor_on
from natgrad.placement import Posted

Pieces = list[tuple[Stack, list[Member]]]


@dataclass
class Tally:
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
    """What has been summed for some blocks of a stack.

    Attributes:
        stack: The stack.
        blocks: Which of its N blocks.
        sums: A tensor ``[n, *packed_shape(spec)]`` for each statistic.
        samples: ``[n]``.
        rows: Samples times positions ``[n]``.
    """

    stack: Stack
    blocks: slice
    sums: dict[str, Tensor]
    samples: Tensor
    rows: Tensor


class Message:
    """Sums that travel together in one buffer, with their counters at its end: samples and rows of each layer.

    Attributes:
        role: What this rank has to do with all of its layers.
    """

    def __init__(self, pieces: Pieces) -> None:
        """Lay out neighbouring layers of some stacks with the same role; no tensor is made."""
        self.pieces, self.role = pieces, pieces[0][0].role
        self.members = [(stack, member) for stack, members in pieces for member in members]
        self.numel = 2 * len(self.members) + sum(
            (members[-1].stop - members[0].start) * prod(packed_shape(spec))
            for stack, members in pieces
            for spec in stack.statistics
        )
        self.buffer: Tensor | None = None
        self.views: dict[str, dict[str, Tensor]] = {}
        self._stacked: list[dict[str, Tensor]] = []

    def allocate(self) -> Tensor:
        """Make the buffer, of uninitialised memory, and cut it into views; or return the one there is."""
        if self.buffer is not None:
            return self.buffer
        first = self.pieces[0][0]
        self.buffer = torch.empty(self.numel, dtype=first.dtype, device=first.device)
        offset = 0
        for stack, members in self.pieces:
            start, size, tensors = members[0].start, members[-1].stop - members[0].start, {}
            for spec in stack.statistics:
                shape = (size, *packed_shape(spec))
                end = offset + prod(shape)
                tensors[spec.name] = self.buffer[offset:end].view(shape)
                offset = end
            self._stacked.append(tensors)
            for member in members:
                own = slice(member.start - start, member.stop - start)
                self.views[member.layer.name] = {name: tensor[own] for name, tensor in tensors.items()}
        return self.buffer

    @property
    def kinds(self) -> dict[str, int]:
        """How many of its elements are of which kind."""
        return {"factors": self.numel - 2 * len(self.members), "counters": 2 * len(self.members)}

    def arrived(self) -> Iterator[Arrived]:
        """Yield the sums of each piece."""
        assert self.buffer is not None
        counters = iter(self.buffer[-2 * len(self.members) :].view(-1, 2).split([len(m) for _, m in self.pieces]))
        for (stack, members), tensors, own in zip(self.pieces, self._stacked, counters, strict=True):
            blocks = slice(members[0].start, members[-1].stop)
            size = blocks.stop - blocks.start
            if size != len(members):
                repeats = tensor_on(own.device, [member.stop - member.start for member in members])
                own = own.repeat_interleave(repeats, dim=0, output_size=size)  # noqa: PLW2901
            yield Arrived(stack, blocks, tensors, own[:, 0], own[:, 1])

    def release(self) -> None:
        """Drop the buffer."""
        self.buffer = None
        self.views.clear()
        self._stacked.clear()

    def give(self) -> Message:
        """Return a message that has the buffer from now on, in place of this one."""
        given = copy(self)
        self.buffer, self.views, self._stacked = None, {}, []
        return given

    def twin(self) -> Message:
        """Return a copy; of what was never allocated one that is not either."""
        other = Message(self.pieces)
        if self.buffer is not None:
            other.allocate().copy_(self.buffer)
        return other

    def blank(self) -> Message:
        """Return one of the same layers, of zeros."""
        other = Message(self.pieces)
        other.allocate().zero_()
        return other

    def close(self, tallies: Mapping[str, Tally], share: float, gain: float | Tensor) -> Tensor:
        """Make it ready to travel, and return the buffer: see `Sums.close`."""
        buffer = self.allocate()
        counters: list[float] = []
        for stack, member in self.members:
            name = member.layer.name
            tally = tallies[name]
            rows = tally.beyond + (tally.rows - tally.beyond) * min(share, 1.0)
            shares = {"samples": share, "rows": rows / max(1, tally.rows)}
            _correct(stack, self.views[name], gain * share, shares, seen=tally.rows > 0)
            counters += [tally.samples * share, rows]
        buffer[-len(counters) :] = tensor_on(buffer.device, counters, buffer.dtype)
        return buffer

    @property
    def scaled(self) -> bool:
        """Whether any of its sums are of gradients that the loss has scaled."""
        return any(not _drawn(stack) and any(spec.degree for spec in stack.statistics) for stack, _ in self.pieces)


class Departed:
    """Messages under way beside the passes that fill the next ones.

    Attributes:
        spoilt: See `Sums`.
        turns: See `Sums`.
    """

    def __init__(
        self, messages: list[Message], posted: list[Posted], spoilt: Tensor | None, turns: dict[int, list[int]]
    ) -> None:
        """Wrap `messages` and what they were `posted` as."""
        self._messages, self._posted, self.spoilt, self.turns = messages, posted, spoilt, turns

    @property
    def whole(self) -> bool:
        """Whether they arrive without this rank sending anything more."""
        return all(posted.whole for posted in self._posted)

    def arrived(self) -> Iterator[Arrived]:
        """Wait, and yield the sums; of a model that was moved meanwhile they are moved too."""
        for message, posted in zip(self._messages, self._posted, strict=True):
            posted.wait()
            for piece in message.arrived():
                place = piece.stack.device, piece.stack.dtype
                sums = {name: tensor.to(*place) for name, tensor in piece.sums.items()}
                yield replace(piece, sums=sums, samples=piece.samples.to(*place), rows=piece.rows.to(*place))
            message.release()


def neighbours(members: Iterable[tuple[Stack, Member]]) -> Pieces:
    """Return layers as runs of those that follow each other in their stacks."""
    stacks: dict[int, Pieces] = {}
    for stack, member in members:
        stacks.setdefault(id(stack), []).append((stack, [member]))
    pieces: Pieces = []
    for runs in stacks.values():
        for stack, (member,) in sorted(runs, key=lambda run: run[1][0].start):
            last = pieces[-1] if pieces else None
            if last and last[0] is stack and last[1][-1].stop == member.start:
                last[1].append(member)
            else:
                pieces.append((stack, [member]))
    return pieces


def _correct(
    stack: Stack, views: dict[str, Tensor], factor: float | Tensor, shares: Mapping[str, float], *, seen: bool
) -> None:
    """Multiply the gradients in a layer's sums by `factor`, counts by the share that their divisor is multiplied by.

    A layer not seen gets zeros.
    """
    plain = _drawn(stack) or (isinstance(factor, float) and factor == 1.0)
    for spec in stack.statistics:
        if not seen:
            views[spec.name].zero_()
        elif spec.degree and not plain:
            views[spec.name].mul_(factor**spec.degree)
        elif spec.counts:
            views[spec.name].mul_(shares[spec.mean])


def _drawn(stack: Stack) -> bool:
    """Tell whether labels are sampled, which know nothing of the loss, its scale and its mean."""
    return stack.curvature.likelihood is not None
