"""The raw sums of one step, in contiguous messages: symmetric matrices as triangles, ready to travel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from natgrad.capture.sums.messages import (
    Arrived,
    Bucket,
    Departed,
    Portion,
    SampleCount,
    Shares,
    neighbours,
    portion_of,
)
from natgrad.distributed import Communicator, Work
from natgrad.linalg.device import on_host
from natgrad.refresh.rule import SIDES, Side
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.tensors import pack

# What `StatisticsBuffer.close` is given, by the number of backward passes.
Gain = Callable[[int], "float | Tensor"]


@dataclass(frozen=True)
class Choice:
    """What is collected of all that curvatures declare.

    Attributes:
        sides: Of the inputs (`BlockGroup.input_statistics`), of what needs gradients, or both.
        without: The names of the layers of which nothing is.
    """

    sides: frozenset[Side] = frozenset(SIDES)
    without: frozenset[str] = frozenset()

    def portion(self, layer: str, group: BlockGroup) -> Portion | None:
        """Return the portion of the statistics of a layer; None: nothing."""
        if layer in self.without or not self.sides:
            return None
        if len(self.sides) == len(SIDES):
            return "whole"
        portion: Portion = "inputs" if "inputs" in self.sides else "rest"
        return portion if portion_of(group, portion) else None


WHOLE = Choice()


class Accumulate(Protocol):
    """`Curvature.accumulate` with the rows of one use."""

    def __call__(self, sums: Mapping[str, Tensor]) -> None:
        """Add to whole sums ``[n, *shape]``."""


class StatisticsBuffer:
    """Raw sums and counts of all layers.

    Memory is taken when a layer is first captured, and dropped when it has been read: at the end of a forward pass,
    when memory is scarcest, the sums would be in the way. With `fused` all sums of one dtype and device are one
    message to each destination; otherwise each layer has its own, which exists no sooner than it must, and on an
    accelerator each group, whose averages take a few calls for all of its layers.

    Attributes:
        skip_step: Whether a ``GradScaler`` skips this step (a lazy bool, the same on all ranks); None: it cannot.
        choice: What is collected.
        basis_version: `BlockGroup.basis_version` as they were when this step began, by the ``id`` of the group.
    """

    def __init__(self, groups: Sequence[BlockGroup], *, fused: bool, kind: str = "factors") -> None:
        """Lay out the messages of those `groups` to whose sums this rank adds or from whom it receives them.

        Args:
            groups: The groups.
            fused: See above.
            kind: What they are counted as.
        """
        groups = [group for group in groups if group.role.captures or group.role.keeps_averages]
        self._fused, self._kind = fused, kind
        self._members = {member.layer.name: (group, member) for group in groups for member in group.members}
        self.tallies = {name: SampleCount() for name in self._members}
        self._filled: set[str] = set()  # the layers whose sums are initialised
        self.skip_step: Tensor | None = None
        self._groups = groups
        self.note_basis_versions()
        self.choice, self._portions = WHOLE, self._portions_of(WHOLE)
        self._layouts = {WHOLE: self._laid_out(self._portions)}
        self._arrange(self._layouts[WHOLE])

    def choose(self, choice: Choice) -> None:
        """Collect no more than what is chosen, from now on; nothing may be collected yet."""
        if choice == self.choice:
            return
        self.choice, self._portions = choice, self._portions_of(choice)
        if choice not in self._layouts:
            self._layouts[choice] = self._laid_out(self._portions)
        self._arrange(self._layouts[choice])

    def _portions_of(self, choice: Choice) -> dict[str, Portion]:
        portions = {name: choice.portion(name, group) for name, (group, _) in self._members.items()}
        return {name: portion for name, portion in portions.items() if portion is not None}

    def _laid_out(self, portions: Mapping[str, Portion]) -> list[Bucket]:
        groups: dict[object, list[tuple[BlockGroup, LayerBlocks, Portion]]] = {}
        for name, portion in portions.items():
            group, member = self._members[name]
            if self._fused:
                key: object = (group.dtype, group.device, *_destination(group))
            else:
                key = name if on_host(group.device) else id(group)
            groups.setdefault(key, []).append((group, member, portion))
        return [Bucket(neighbours(layers), self._kind) for layers in groups.values()]

    def portion(self, layer: str) -> Portion | None:
        """Return which statistics of a layer are collected; None: none, or there are no sums of it."""
        return self._portions.get(layer)

    def _arrange(self, messages: list[Bucket]) -> None:
        """Collect in these messages from now on."""
        self._messages = messages
        self._homes: dict[str, list[Bucket]] = {name: [] for name in self._members}
        for message in self._messages:
            for layer in message.places:
                self._homes[layer].append(message)

    @property
    def empty(self) -> bool:
        """Whether nothing was added since the last step."""
        return not any(tally.rows for tally in self.tallies.values())

    def of(self, layer: str) -> dict[str, Tensor]:
        """Return the sums of a layer ``[n, *packed_shape(spec)]``, uninitialised if its tally is at zero."""
        return self._views(layer)

    def _views(self, layer: str) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for message in self._homes[layer]:
            message.allocate()
            views |= message.views[layer]
        return views

    def add(self, layer: str, accumulate: Accumulate) -> None:
        """Add what one use of a layer shows; its tally is counted afterwards.

        It is packed at once, so that no whole matrix outlives the hook.

        Args:
            layer: The layer.
            accumulate: Adds to whole sums, as `Curvature.accumulate` does.
        """
        views, (group, member) = self._views(layer), self._members[layer]
        specs = portion_of(group, self._portions[layer])
        like = next(iter(views.values()))
        whole = {spec.name: like.new_zeros(member.stop - member.start, *spec.shape) for spec in specs}
        accumulate(whole)
        for spec in specs:
            if layer in self._filled:
                views[spec.name].add_(pack(whole.pop(spec.name), spec))
            else:
                pack(whole.pop(spec.name), spec, views[spec.name])
        self._filled.add(layer)

    def abandon(self) -> None:
        """End what is under way: others take the place of these sums; all ranks together."""

    def travel(self, runtime: Communicator, wire: torch.dtype | None) -> None:
        """Sum the closed messages over the ranks, in place.

        Args:
            runtime: The ranks.
            wire: The dtype in which sums travel, if narrower than their own.
        """
        to_workers: dict[object, list[Bucket]] = {}
        for message in self._messages:
            assert message.buffer is not None
            if message.role.seat.sums == "all":
                runtime.sum_(message.buffer, message.kinds, wire)
            elif message.role.seat.sums == "worker" and runtime.ranks > 1:
                to_workers.setdefault((message.buffer.dtype, message.buffer.device), []).append(message)
        for messages in to_workers.values():
            self._reduce_to_workers(messages, runtime, wire)

    def _reduce_to_workers(self, messages: list[Bucket], runtime: Communicator, wire: torch.dtype | None) -> None:
        """Sum messages of one dtype and device on the one worker of each."""
        nothing = messages[0].allocate()[:0]
        values, counters = [nothing] * runtime.ranks, [nothing] * runtime.ranks
        for message in messages:
            values[message.role.server], counters[message.role.server] = message.halves()
        summed = runtime.reduce_to_owners(values, counters, self._kind, wire)
        for message in messages:
            if message.role.server == runtime.rank:
                for half, result in zip(message.halves(), summed, strict=True):
                    half.copy_(result)

    def post(self, runtime: Communicator, wire: torch.dtype | None) -> list[Work]:
        """Begin what `travel` does, in a queue of its own; only where all ranks receive all sums."""
        posted = []
        for message in self._messages:
            assert message.buffer is not None
            posted.append(runtime.post_sum(message.buffer, message.kinds, wire, runtime.background))
        return posted

    def depart(self, posted: list[Work]) -> Departed:
        """Give away the messages that were `posted`."""
        return Departed([message.give() for message in self._messages], posted, self.skip_step, self.basis_version)

    def close(self, shares: Shares, gain: float | Tensor) -> None:
        """Make the messages ready to travel: unseen layers become zeros, gradients per-sample ones, counters filled in.

        Each rank corrects its own sums, for its share and its gain are its own.

        Args:
            shares: For each layer, how many tokens count of those that it was taken to have; all where it is missing.
            gain: What makes captured gradients of the loss those of per-sample losses, beside the number of samples.
        """
        for message in self._messages:
            message.close(self.tallies, shares, gain)

    def arrived(self) -> Iterator[Arrived]:
        """Yield the sums that are this rank's as they stand now, and drop each message once it has been read."""
        for message in self._messages:
            if message.role.keeps_averages:
                yield from message.arrived()
            message.release()

    def note_basis_versions(self) -> None:
        """Note that a step begins: what is summed from now on sees what renewals have made by now.

        At the same moment on all ranks, whatever passes they throw away.
        """
        self.basis_version = {id(group): list(group.basis_version) for group in self._groups}

    def reset(self) -> None:
        """Begin the next step."""
        for tally in self.tallies.values():
            tally.samples = tally.rows = tally.beyond = tally.task_samples = 0
            tally.task = None
        self._filled.clear()
        self.skip_step = None
        for message in self._messages:
            message.release()


def _destination(group: BlockGroup) -> tuple[object, ...]:
    seat = group.role.seat
    return seat.sums, None if seat.sums == "all" else seat.workers
