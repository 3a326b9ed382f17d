"""The raw sums of one step: one contiguous message per dtype and device, into which the hooks write directly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from natgrad.blocks import Member, Stack


@dataclass
class Tally:
    """What was added to the sums of one layer since the last step.

    Attributes:
        samples: Samples; a layer used several times in one backward pass sees the same samples each time.
        rows: Samples times positions, over all uses.
        task: The backward pass that came last.
        task_samples: The samples counted for that pass.
    """

    samples: int = 0
    rows: int = 0
    task: int | None = None
    task_samples: int = 0

    def count(self, task: int, samples: int, rows: int) -> None:
        """Count one use in the backward pass `task`."""
        known = self.task_samples if task == self.task else 0
        self.samples += max(0, samples - known)
        self.task, self.task_samples = task, max(samples, known)
        self.rows += rows


@dataclass
class _Message:
    """The sums of all stacks with one dtype and device, then the counters: samples and rows of each layer."""

    stacks: list[Stack]
    numel: int = 0
    buffer: Tensor | None = None
    views: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    stacked: list[dict[str, Tensor]] = field(default_factory=list)

    def allocate(self) -> Tensor:
        """Make the buffer and cut it into views; its memory is uninitialised."""
        first = self.stacks[0]
        self.buffer = torch.empty(self.numel, dtype=first.dtype, device=first.device)
        offset = 0
        for stack in self.stacks:
            tensors = {}
            for spec in stack.statistics:
                end = offset + stack.size * spec.numel
                tensors[spec.name] = self.buffer[offset:end].view(stack.size, *spec.shape)
                offset = end
            self.stacked.append(tensors)
            for member in stack.members:
                self.views[member.layer.name] = {name: t[member.blocks] for name, t in tensors.items()}
        return self.buffer

    def release(self) -> None:
        """Drop the buffer."""
        self.buffer = None
        self.views.clear()
        self.stacked.clear()


class Sums:
    """Raw sums and counts of all layers.

    Memory is taken at the first capture of a step and dropped by `release`.
    """

    def __init__(self, stacks: Sequence[Stack]) -> None:
        """Lay out the messages; no tensor is made."""
        groups: dict[tuple[torch.dtype, torch.device], list[Stack]] = {}
        for stack in stacks:
            groups.setdefault((stack.dtype, stack.device), []).append(stack)
        self._messages = [_Message(group) for group in groups.values()]
        self._home: dict[str, _Message] = {}
        self.tallies: dict[str, Tally] = {}
        for message in self._messages:
            for stack in message.stacks:
                message.numel += stack.size * sum(spec.numel for spec in stack.statistics)
                for member in stack.members:
                    message.numel += 2
                    self._home[member.layer.name] = message
                    self.tallies[member.layer.name] = Tally()

    @property
    def empty(self) -> bool:
        """Whether nothing was added since the last step."""
        return all(message.buffer is None for message in self._messages) or not any(
            tally.rows for tally in self.tallies.values()
        )

    def of(self, layer: str) -> dict[str, Tensor]:
        """Return the sums of a layer ``[n, *shape]``, uninitialised if its tally is at zero."""
        message = self._home[layer]
        if message.buffer is None:
            message.allocate()
        return message.views[layer]

    def close(self, shares: dict[str, float], gain: float | Tensor) -> list[tuple[Tensor, dict[str, int]]]:
        """Make the messages ready to travel: unseen layers become zeros, gradients per-sample ones, counters filled in.

        Each rank corrects its own sums, for its shares and its gain are its own.

        Args:
            shares: For a layer, the share of its positions that count (masked tokens); 1 where absent.
            gain: What makes captured gradients of the loss those of per-sample losses, beside the number of samples.

        Returns:
            Each message with its elements by kind.
        """
        ready = []
        for message in self._messages:
            buffer = message.buffer if message.buffer is not None else message.allocate()
            counters: list[float] = []
            for stack, member in _members(message):
                name = member.layer.name
                tally, share = self.tallies[name], shares.get(name, 1.0)
                _correct(stack, message.views[name], gain * share, seen=tally.rows > 0)
                counters += [tally.samples * share, tally.rows * share]
            buffer[-len(counters) :] = torch.tensor(counters, dtype=buffer.dtype)
            ready.append((buffer, {"factors": message.numel - len(counters), "counters": len(counters)}))
        return ready

    def arrived(self) -> list[tuple[Stack, dict[str, Tensor], Tensor, Tensor]]:
        """Return for each stack its sums ``[N, *shape]``, samples ``[N]`` and rows ``[N]``, as they stand now."""
        result = []
        for message in self._messages:
            assert message.buffer is not None
            counters = message.buffer[-2 * len(_members(message)) :].view(-1, 2)
            start = 0
            for stack, tensors in zip(message.stacks, message.stacked, strict=True):
                own = counters[start : start + len(stack.members)]
                start += len(stack.members)
                if stack.size != len(stack.members):
                    blocks = [member.stop - member.start for member in stack.members]
                    own = own.repeat_interleave(torch.tensor(blocks, device=own.device), dim=0, output_size=stack.size)
                result.append((stack, tensors, own[:, 0], own[:, 1]))
        return result

    def release(self) -> None:
        """Drop the sums: at the end of the next forward pass, when memory is scarcest, they would be in the way."""
        for message in self._messages:
            message.release()

    def reset(self) -> None:
        """Begin the next step."""
        for tally in self.tallies.values():
            tally.samples = tally.rows = tally.task_samples = 0
            tally.task = None
        self.release()


def _members(message: _Message) -> list[tuple[Stack, Member]]:
    return [(stack, member) for stack in message.stacks for member in stack.members]


def _correct(stack: Stack, views: dict[str, Tensor], factor: float | Tensor, *, seen: bool) -> None:
    """Multiply the gradients in a layer's sums by `factor`; a layer that was not seen gets zeros."""
    # Sampled labels know nothing of the loss, its scale and its mean.
    plain = stack.curvature.likelihood is not None or (isinstance(factor, float) and factor == 1.0)
    for spec in stack.statistics:
        if not seen:
            views[spec.name].zero_()
        elif spec.degree and not plain:
            views[spec.name].mul_(factor**spec.degree)
