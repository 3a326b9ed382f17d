"""The raw sums of one step, in contiguous messages into which the hooks write directly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.blocks import Member, Stack
from natgrad.linalg import tensor_on


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
        sums: A tensor ``[n, *shape]`` for each statistic.
        samples: ``[n]``.
        rows: Samples times positions ``[n]``.
    """

    stack: Stack
    blocks: slice
    sums: dict[str, Tensor]
    samples: Tensor
    rows: Tensor


class _Message:
    """Sums that travel together in one buffer, with their counters at its end: samples and rows of each layer."""

    def __init__(self, pieces: list[tuple[Stack, list[Member]]]) -> None:
        """Lay out neighbouring layers of some stacks; no tensor is made."""
        self.pieces = pieces
        self.members = [(stack, member) for stack, members in pieces for member in members]
        self.numel = 2 * len(self.members) + sum(
            (members[-1].stop - members[0].start) * spec.numel for stack, members in pieces for spec in stack.statistics
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
                end = offset + size * spec.numel
                tensors[spec.name] = self.buffer[offset:end].view(size, *spec.shape)
                offset = end
            self._stacked.append(tensors)
            for member in members:
                own = slice(member.start - start, member.stop - start)
                self.views[member.layer.name] = {name: tensor[own] for name, tensor in tensors.items()}
        return self.buffer

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


class Sums:
    """Raw sums and counts of all layers.

    Memory is taken when a layer is first captured, and dropped when it has been read: at the end of a forward pass,
    when memory is scarcest, the sums would be in the way. With `fused` all sums of one dtype and device are one
    message; otherwise each layer has its own, which exists no sooner than it must.
    """

    def __init__(self, stacks: Sequence[Stack], *, fused: bool) -> None:
        """Lay out the messages; no tensor is made."""
        groups: dict[object, list[tuple[Stack, list[Member]]]] = {}
        for stack in stacks:
            if fused:
                groups.setdefault((stack.dtype, stack.device), []).append((stack, stack.members))
            else:
                groups.update({member.layer.name: [(stack, [member])] for member in stack.members})
        self._messages = [_Message(pieces) for pieces in groups.values()]
        self._home = {member.layer.name: message for message in self._messages for _, member in message.members}
        self.tallies = {name: Tally() for name in self._home}

    @property
    def empty(self) -> bool:
        """Whether nothing was added since the last step."""
        return not any(tally.rows for tally in self.tallies.values())

    def of(self, layer: str) -> dict[str, Tensor]:
        """Return the sums of a layer ``[n, *shape]``, uninitialised if its tally is at zero."""
        message = self._home[layer]
        message.allocate()
        return message.views[layer]

    def close(self, share: float, gain: float | Tensor, *, tidy: bool = False) -> list[tuple[Tensor, dict[str, int]]]:
        """Make the messages ready to travel: unseen layers become zeros, gradients per-sample ones, counters filled in.

        Each rank corrects its own sums, for its share and its gain are its own.

        Args:
            share: How many positions of the loss count (masked tokens) of those that it was taken to have.
            gain: What makes captured gradients of the loss those of per-sample losses, beside the number of samples.
            tidy: Clear what symmetric sums hold above their diagonals, which is anything.

        Returns:
            Each message with its elements by kind.
        """
        ready = []
        for message in self._messages:
            buffer = message.allocate()
            counters: list[float] = []
            for stack, member in message.members:
                name = member.layer.name
                tally = self.tallies[name]
                _correct(stack, message.views[name], gain * share, share, seen=tally.rows > 0)
                if tidy:
                    _tidy(stack, message.views[name])
                counters += [tally.samples * share, tally.beyond + (tally.rows - tally.beyond) * min(share, 1.0)]
            buffer[-len(counters) :] = tensor_on(buffer.device, counters, buffer.dtype)
            ready.append((buffer, {"factors": message.numel - len(counters), "counters": len(counters)}))
        return ready

    def arrived(self) -> Iterator[Arrived]:
        """Yield the sums as they stand now, and drop each message once it has been read."""
        for message in self._messages:
            yield from message.arrived()
            message.release()

    def reset(self) -> None:
        """Begin the next step."""
        for tally in self.tallies.values():
            tally.samples = tally.rows = tally.beyond = tally.task_samples = 0
            tally.task = None
        for message in self._messages:
            message.release()


def _correct(stack: Stack, views: dict[str, Tensor], factor: float | Tensor, share: float, *, seen: bool) -> None:
    """Multiply the gradients in a layer's sums by `factor`, counts by `share`; a layer not seen gets zeros."""
    # Sampled labels know nothing of the loss, its scale and its mean.
    plain = stack.curvature.likelihood is not None or (isinstance(factor, float) and factor == 1.0)
    for spec in stack.statistics:
        if not seen:
            views[spec.name].zero_()
        elif spec.degree and not plain:
            views[spec.name].mul_(factor**spec.degree)
        elif spec.counts:
            views[spec.name].mul_(share)


def _tidy(stack: Stack, views: dict[str, Tensor]) -> None:
    for spec in stack.statistics:
        if spec.symmetric:
            views[spec.name].tril_()
