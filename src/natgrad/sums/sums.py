"""The raw sums of one step, in contiguous messages: symmetric matrices as triangles, ready to travel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from natgrad.placement import Posted, Runtime
from natgrad.stacks.blocks import Member, Stack
from natgrad.stacks.kept import pack
from natgrad.sums.choice import WHOLE, Choice
from natgrad.sums.messages import Arrived, Departed, Message, Portion, Shares, Tally, neighbours, portion_of
from natgrad.sums.whole import Whole, alone

# What `Sums.close` is given, by the number of backward passes.
Gain = Callable[[int], "float | Tensor"]


class Accumulate(Protocol):
    """`Curvature.accumulate` with the rows of one use."""

    def __call__(self, sums: Mapping[str, Tensor]) -> None:
        """Add to whole sums ``[n, *shape]``."""


class Sums:
    """Raw sums and counts of all layers.

    Memory is taken when a layer is first captured, and dropped when it has been read: at the end of a forward pass,
    when memory is scarcest, the sums would be in the way. With `fused` all sums of one dtype and device are one
    message to each destination; otherwise each layer has its own, which exists no sooner than it must, and on an
    accelerator each stack, whose averages take a few calls for all of its layers.

    Attributes:
        spoilt: Whether a ``GradScaler`` skips this step (a lazy bool, the same on all ranks); None: it cannot.
        choice: What is collected.
        rider: What this rank has to say beside its sums.
        turns: `Stack.turns` as they were when this step began, by the ``id`` of the stack.
        extra: What travels with the first message to all ranks in this step alone, after `carry` has made room for it;
            after `travel` it is the sum over the ranks.
    """

    def __init__(self, stacks: Sequence[Stack], *, fused: bool, kind: str = "factors", riders: int = 0) -> None:
        """Lay out the messages of those `stacks` to whose sums this rank adds or from whom it receives them.

        Args:
            stacks: The stacks.
            fused: See above.
            kind: What they are counted as.
            riders: How many numbers of `rider` travel with a message to all ranks.
        """
        stacks = [stack for stack in stacks if stack.role.captures or stack.role.receives]
        self._fused, self._kind, self._riders = fused, kind, riders
        self.rider: Sequence[float] = ()
        self.extra: Tensor | None = None
        self._carrier: Message | None = None
        self._members = {member.layer.name: (stack, member) for stack in stacks for member in stack.members}
        self.tallies = {name: Tally() for name in self._members}
        self._open: dict[str, dict[str, Tensor]] = {}  # sums of layers that are not packed yet
        self._filled: set[str] = set()  # the layers that have packed ones
        self._memory = Whole(stacks)
        self.spoilt: Tensor | None = None
        self._stacks = stacks
        self.note_turns()
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
        portions = {name: choice.portion(name, stack) for name, (stack, _) in self._members.items()}
        return {name: portion for name, portion in portions.items() if portion is not None}

    def _laid_out(self, portions: Mapping[str, Portion]) -> list[Message]:
        groups: dict[object, list[tuple[Stack, Member, Portion]]] = {}
        for name, portion in portions.items():
            stack, member = self._members[name]
            if self._fused:
                key: object = (stack.dtype, stack.device, *_destination(stack))
            else:
                key = name if stack.device.type == "cpu" else id(stack)
            groups.setdefault(key, []).append((stack, member, portion))
        messages, riders = [], self._riders
        for layers in groups.values():
            rides = layers[0][0].role.seat.sums == "all"
            messages.append(Message(neighbours(layers), self._kind, riders if rides else 0))
            riders = 0 if rides else riders
        return messages

    def portion(self, layer: str) -> Portion | None:
        """Return which statistics of a layer are collected; None: none, or there are no sums of it."""
        return self._portions.get(layer)

    def carry(self, numbers: int) -> None:
        """Make room for so many numbers in `extra` until the next call, where they can travel; before hooks have run.

        The same on all ranks.
        """
        if self._carrier is not None:
            self._carrier.extra = 0
        self._carrier = self._first_carrier if numbers and self._fused else None
        if self._carrier is not None:
            self._carrier.extra = numbers

    @property
    def _first_carrier(self) -> Message | None:
        return next((message for message in self._messages if message.role.seat.sums == "all"), None)

    @property
    def carries(self) -> bool:
        """Whether there is room for `extra`."""
        return self._carrier is not None

    def _arrange(self, messages: list[Message]) -> None:
        """Collect in these messages from now on."""
        self._messages = messages
        self._homes: dict[str, list[Message]] = {name: [] for name in self._members}
        for message in self._messages:
            for layer in message.places:
                self._homes[layer].append(message)

    @property
    def empty(self) -> bool:
        """Whether nothing was added since the last step."""
        return not any(tally.rows for tally in self.tallies.values())

    def of(self, layer: str) -> dict[str, Tensor]:
        """Return the sums of a layer ``[n, *packed_shape(spec)]``, uninitialised if its tally is at zero."""
        self._pack(layer)
        return self._views(layer)

    def _views(self, layer: str) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for message in self._homes[layer]:
            message.allocate()
            views |= message.views[layer]
        return views

    def add(self, layer: str, task: int, accumulate: Accumulate) -> None:
        """Add what one use of a layer shows; its tally is counted afterwards.

        The first use in a backward pass is packed at once, so that no whole matrix outlives the hook. Those that follow
        in the same pass (weights shared over time) are summed whole, and packed together. So is all of a step where the
        matrices are small and it is calls that take the time: then a stack is packed as one.

        Args:
            layer: The layer.
            task: The backward pass.
            accumulate: Adds to whole sums, as `Curvature.accumulate` does.
        """
        tally = self.tallies[layer]
        again = tally.task == task and tally.rows > 0
        if again or self._stays_whole(layer):
            self._add_whole(layer, accumulate)
        else:
            self._pack(layer)
            whole = self._whole(layer)
            accumulate(whole)
            self._merge(layer, whole)

    def abandon(self) -> None:
        """End what is under way: others take the place of these sums; all ranks together."""

    def _add_whole(self, layer: str, accumulate: Accumulate) -> None:
        """Add what a use shows to the whole sums of a layer."""
        begun = layer in self._open
        own = self._open[layer] if begun else self._whole(layer)
        try:
            accumulate(own)
        except BaseException:
            if begun:  # who goes on in spite of it may have half of a use there: then none of this step counts
                for sums in own.values():
                    sums.fill_(torch.nan)
            raise
        self._open[layer] = own

    def _stays_whole(self, layer: str) -> bool:
        """Tell whether all that a layer shows in a step is summed whole, beside the other layers of its stack."""
        return self._memory.takes(self._members[layer][0])

    def _whole(self, layer: str) -> dict[str, Tensor]:
        """Return memory with zeros in it for the whole sums of a layer."""
        stack, member = self._members[layer]
        specs = portion_of(stack, self._portions[layer])
        if self._stays_whole(layer):
            whole = {spec.name: self._memory.of(stack, spec, member.blocks) for spec in specs}
        else:
            like = next(iter(self._views(layer).values()))
            whole = {spec.name: alone(like, member.stop - member.start, spec) for spec in specs}
        torch._foreach_zero_(list(whole.values()))
        return whole

    def _pack(self, layer: str) -> None:
        """Add the whole sums of a layer, if there are any, to those that travel."""
        if layer in self._open:
            self._merge(layer, self._open.pop(layer))

    def _pack_all(self, message: Message) -> None:
        """Add all whole sums of the layers of a message to it: those of neighbours in one call, where that can be."""
        for index, piece in enumerate(message.pieces):
            for together, run in groupby(piece.members, lambda member: self._awaits(member.layer.name)):
                members = list(run)
                if together:
                    self._pack_run(message, index, members)
                for member in members:
                    self._pack(member.layer.name)
            if not any(member.layer.name in self._open for member in piece.stack.members):
                self._memory.drop(piece.stack)

    def _pack_run(self, message: Message, index: int, members: Sequence[Member]) -> None:
        """Pack neighbours of a message's piece that all await it."""
        message.allocate()
        piece, blocks = message.pieces[index], slice(members[0].start, members[-1].stop)
        packed = message.stacked(index, blocks)
        for spec in piece.specs:
            pack(self._memory.of(piece.stack, spec, blocks), spec, packed[spec.name])
        for member in members:
            del self._open[member.layer.name]
            self._filled.add(member.layer.name)

    def _awaits(self, layer: str) -> bool:
        """Tell whether all of a layer's sums are whole, of a stack whose sums are, and travel together."""
        waits = layer in self._open and layer not in self._filled
        return waits and self._stays_whole(layer) and len(self._homes[layer]) == 1

    def _merge(self, layer: str, whole: dict[str, Tensor]) -> None:
        views, overwrite = self._views(layer), layer not in self._filled
        self._filled.add(layer)
        for spec in portion_of(self._members[layer][0], self._portions[layer]):
            if overwrite:
                pack(whole.pop(spec.name), spec, views[spec.name])
            else:
                views[spec.name].add_(pack(whole.pop(spec.name), spec))

    def travel(self, runtime: Runtime, wire: torch.dtype | None) -> None:
        """Sum the closed messages over the ranks, in place.

        Args:
            runtime: The ranks.
            wire: The dtype in which sums travel, if narrower than their own.
        """
        to_workers: dict[object, list[Message]] = {}
        self._load()
        for message in self._messages:
            assert message.buffer is not None
            if message.role.seat.sums == "all":
                runtime.sum_(message.buffer, message.kinds, wire)
            elif message.role.seat.sums == "worker" and runtime.ranks > 1:
                to_workers.setdefault((message.buffer.dtype, message.buffer.device), []).append(message)
        for messages in to_workers.values():
            self._reduce_to_workers(messages, runtime, wire)
        self._unload()

    def _reduce_to_workers(self, messages: list[Message], runtime: Runtime, wire: torch.dtype | None) -> None:
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

    def _load(self) -> None:
        """Write `extra` behind the message that carries it."""
        if self._carrier is not None and self.extra is not None:
            self._carrier.allocate()[self._carrier.numel :] = self.extra

    def _unload(self) -> None:
        """Read `extra` from the message that has carried it."""
        if self._carrier is not None and self.extra is not None:
            self.extra = self._carrier.allocate()[self._carrier.numel :].clone()

    def post(self, runtime: Runtime, wire: torch.dtype | None) -> list[Posted]:
        """Begin what `travel` does, in a queue of its own; only where all ranks receive all sums."""
        posted = []
        for message in self._messages:
            assert message.buffer is not None
            posted.append(runtime.post_sum(message.buffer, message.kinds, wire, runtime.background))
        return posted

    def depart(self, posted: list[Posted]) -> Departed:
        """Give away the messages that were `posted`."""
        rider = () if self._fused else self.rider
        return Departed([message.give() for message in self._messages], posted, self.spoilt, self.turns, rider)

    def close(self, shares: Shares, gain: float | Tensor) -> None:
        """Make the messages ready to travel: unseen layers become zeros, gradients per-sample ones, counters filled in.

        Each rank corrects its own sums, for its share and its gain are its own.

        Args:
            shares: For each layer, how many tokens count of those that it was taken to have; all where it is missing.
            gain: What makes captured gradients of the loss those of per-sample losses, beside the number of samples.
        """
        self._pack_rest()
        for message in self._messages:
            message.close(self.tallies, shares, gain, self.rider)

    def _pack_rest(self) -> None:
        """Pack all that is still whole."""
        for message in self._messages if self._open else ():
            self._pack_all(message)
        self._memory.clear()

    @property
    def heard(self) -> Tensor | Sequence[float] | None:
        """The riders of all ranks, summed up, between `travel` and `arrived`; None: none has traveled."""
        if not self._fused:
            return self.rider
        return next((own for message in self._messages if (own := message.riders) is not None), None)

    def arrived(self) -> Iterator[Arrived]:
        """Yield the sums that are this rank's as they stand now, and drop each message once it has been read."""
        for message in self._messages:
            if message.role.receives:
                yield from message.arrived()
            message.release()

    def note_turns(self) -> None:
        """Note that a step begins: what is summed from now on sees what renewals have made by now.

        At the same moment on all ranks, whatever passes they throw away.
        """
        self.turns = {id(stack): list(stack.turns) for stack in self._stacks}

    def reset(self) -> None:
        """Begin the next step."""
        for tally in self.tallies.values():
            tally.samples = tally.rows = tally.beyond = tally.task_samples = 0
            tally.task = None
        for known in (self._open, self._filled, self._memory):
            known.clear()
        self.spoilt = None
        for message in self._messages:
            message.release()


def _destination(stack: Stack) -> tuple[object, ...]:
    seat = stack.role.seat
    return seat.sums, None if seat.sums == "all" else seat.workers
