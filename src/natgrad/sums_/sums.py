"""The raw sums of one step, in contiguous messages: symmetric matrices as triangles, ready to travel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from natgrad.blocks import Member, Stack
from natgrad.kept import pack, packed_shape
from natgrad.linalg import tensor_on
from natgrad.placement import Runtime


class Observe(Protocol):
    """`Curvature.observe` with the rows of one use."""

    def __call__(self, sums: Mapping[str, Tensor], *, first: bool) -> None:
        """Add to whole sums ``[n, *shape]``, or write into uninitialised ones."""


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


class _Message:
    """Sums that travel together in one buffer, with their counters at its end: samples and rows of each layer.

    Attributes:
        role: What this rank has to do with all of its layers.
    """

    def __init__(self, pieces: list[tuple[Stack, list[Member]]]) -> None:
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


class Sums:
    """Raw sums and counts of all layers.

    Memory is taken when a layer is first captured, and dropped when it has been read: at the end of a forward pass,
    when memory is scarcest, the sums would be in the way. With `fused` all sums of one dtype and device are one
    message to each destination; otherwise each layer has its own, which exists no sooner than it must.
    """

    def __init__(self, stacks: Sequence[Stack], *, fused: bool) -> None:
        """Lay out the messages of those `stacks` to whose sums this rank adds or from whom it receives them."""
        groups: dict[object, list[tuple[Stack, list[Member]]]] = {}
        stacks = [stack for stack in stacks if stack.role.captures or stack.role.receives]
        for stack in stacks:
            if fused:
                groups.setdefault((stack.dtype, stack.device, *_destination(stack)), []).append((stack, stack.members))
            else:
                groups.update({member.layer.name: [(stack, [member])] for member in stack.members})
        self._messages = [_Message(pieces) for pieces in groups.values()]
        self._home = {member.layer.name: message for message in self._messages for _, member in message.members}
        self.tallies = {name: Tally() for name in self._home}
        self._members = {member.layer.name: (stack, member) for stack in stacks for member in stack.members}
        self._open: dict[str, dict[str, Tensor]] = {}

    @property
    def empty(self) -> bool:
        """Whether nothing was added since the last step."""
        return not any(tally.rows for tally in self.tallies.values())

    def of(self, layer: str) -> dict[str, Tensor]:
        """Return the sums of a layer ``[n, *packed_shape(spec)]``, uninitialised if its tally is at zero."""
        message = self._home[layer]
        message.allocate()
        return message.views[layer]

    def add(self, layer: str, task: int, observe: Observe) -> None:
        """Add what one use of a layer shows; its tally is counted afterwards.

        The first use in a backward pass is packed at once, so that no whole matrix outlives the hook. Those that follow
        in the same pass (weights shared over time) are summed whole, and packed together.

        Args:
            layer: The layer.
            task: The backward pass.
            observe: Adds to whole sums, as `Curvature.observe` does.
        """
        tally = self.tallies[layer]
        if tally.task == task and tally.rows:
            begun = layer in self._open
            if not begun:
                self._open[layer] = self._whole(layer)
            observe(self._open[layer], first=not begun)
            return
        self._pack(layer)
        whole = self._whole(layer)
        observe(whole, first=True)
        self._merge(layer, whole, overwrite=not tally.rows)

    def _whole(self, layer: str) -> dict[str, Tensor]:
        stack, member = self._members[layer]
        blocks, like = member.stop - member.start, next(iter(self.of(layer).values()))
        return {spec.name: like.new_empty(blocks, *spec.shape) for spec in stack.statistics}

    def _pack(self, layer: str) -> None:
        """Add the whole sums of a layer, if there are any, to those that travel."""
        if layer in self._open:
            self._merge(layer, self._open.pop(layer), overwrite=False)

    def _merge(self, layer: str, whole: dict[str, Tensor], *, overwrite: bool) -> None:
        views = self.of(layer)
        for spec in self._members[layer][0].statistics:
            target = views[spec.name]
            if overwrite:
                pack(whole.pop(spec.name), spec, target)
            else:
                target.add_(pack(whole.pop(spec.name), spec))

    def travel(self, runtime: Runtime, wire: torch.dtype | None) -> None:
        """Sum the closed messages over the ranks, in place.

        Args:
            runtime: The ranks.
            wire: The dtype in which sums travel, if narrower than their own.
        """
        to_workers: dict[object, list[_Message]] = {}
        for message in self._messages:
            assert message.buffer is not None
            if message.role.seat.sums == "all":
                runtime.sum_(message.buffer, message.kinds, wire)
            elif message.role.seat.sums == "worker":
                to_workers.setdefault((message.buffer.dtype, message.buffer.device), []).append(message)
        for messages in to_workers.values():
            runtime.sum_to_([(message.role.server, message.allocate(), message.kinds) for message in messages], wire)

    def close(self, share: float, gain: float | Tensor) -> None:
        """Make the messages ready to travel: unseen layers become zeros, gradients per-sample ones, counters filled in.

        Each rank corrects its own sums, for its share and its gain are its own.

        Args:
            share: How many positions of the loss count (masked tokens) of those that it was taken to have.
            gain: What makes captured gradients of the loss those of per-sample losses, beside the number of samples.
        """
        for layer in list(self._open):
            self._pack(layer)
        for message in self._messages:
            buffer = message.allocate()
            counters: list[float] = []
            for stack, member in message.members:
                name = member.layer.name
                tally = self.tallies[name]
                _correct(stack, message.views[name], gain * share, share, seen=tally.rows > 0)
                counters += [tally.samples * share, tally.beyond + (tally.rows - tally.beyond) * min(share, 1.0)]
            buffer[-len(counters) :] = tensor_on(buffer.device, counters, buffer.dtype)

    def arrived(self) -> Iterator[Arrived]:
        """Yield the sums that are this rank's as they stand now, and drop each message once it has been read."""
        for message in self._messages:
            if message.role.receives:
                yield from message.arrived()
            message.release()

    def reset(self) -> None:
        """Begin the next step."""
        for tally in self.tallies.values():
            tally.samples = tally.rows = tally.beyond = tally.task_samples = 0
            tally.task = None
        self._open.clear()
        for message in self._messages:
            message.release()


def _destination(stack: Stack) -> tuple[object, ...]:
    seat = stack.role.seat
    return seat.sums, None if seat.sums == "all" else seat.workers


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
