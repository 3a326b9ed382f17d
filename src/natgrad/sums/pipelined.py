"""Sums that leave while the backward pass goes on (SPD-KFAC, Shi 2021).

A layer's sums can leave once its last gradient of the step has come. No wrapper tells which that is, so each rank
expects what it has seen: as many gradients as mostly came in the steps before, over all micro-batches and all uses of a
weight. With accumulation it is hence the last micro-batch whose messages leave, under any wrapper and under none.

That is a guess, on which nothing but time depends. What leaves early is a copy. `step` knows what is true, and the
ranks tell each other in a message of a few numbers which copies were right. Those that were not, for gradients that
came later, passes that were thrown away, masks or loss scales that only `step` knows, are sent again by all ranks.
Whatever happens on one rank, all post the same messages in the same order: early ones by their number, each no sooner
than the one before, and in `step` the rest.

A, which is known in the forward pass, does not leave then: no sum is that of the loss before a gradient hook has come
(evaluation, masked positions and unused branches leave no trace), and a curvature observes inputs and gradients at
once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from threading import Lock
from time import perf_counter
from typing import TypeAlias

import torch
from torch import Tensor

from natgrad.blocks import Stack
from natgrad.placement import Placement, Posted, Runtime, fuse, narrower
from natgrad.sums.messages import Arrived, Message, neighbours
from natgrad.sums.sums import Sums

Gain = Callable[[int], "float | Tensor"]
_Stamp: TypeAlias = "float | torch.cuda.Event"

# Captured steps of which the most frequent number of gradients is expected: the last accumulation of an epoch is short.
_MEMORY = 4
# Captured steps in which it is measured when layers are ready; the first is slower than those that follow.
_MEASURED = 3
# The most captured steps in which nothing leaves early, after guesses that were wrong again and again.
_PATIENCE = 64


def make_sums(
    stacks: Sequence[Stack], placement: Placement, runtime: Runtime, wire: torch.dtype | None, gain: Gain
) -> Sums:
    """Return the sums of some stacks as a placement sends them.

    Args:
        stacks: The blocks.
        placement: The options.
        runtime: The ranks.
        wire: The dtype in which sums travel, if narrower than their own.
        gain: What `Sums.close` is given, by the number of backward passes.
    """
    if placement.name == "pipelined" and runtime.ranks > 1:
        return PipelinedSums(stacks, placement, runtime, wire, gain)
    return Sums(stacks, fused=runtime.ranks > 1)


@dataclass
class _Travel:
    """A message under way.

    Attributes:
        message: Its sums: a copy, if it has left early.
        posted: What to wait for.
        gain: What made its gradients those of per-sample losses.
        late: Whether it has turned out not to be what it should be.
        before: An earlier one of the same layers that was.
    """

    message: Message
    posted: Posted
    gain: float | Tensor
    late: bool = False
    before: Posted | None = None

    def wait(self) -> None:
        """Wait until it has arrived."""
        if self.before is not None:
            self.before.wait()
        self.posted.wait()


class PipelinedSums(Sums):
    """Raw sums of which each message may leave before `step`, on each rank when it is ready there.

    It takes the memory of the sums twice, from when they leave to `step`.
    """

    def __init__(
        self,
        stacks: Sequence[Stack],
        placement: Placement,
        runtime: Runtime,
        wire: torch.dtype | None,
        gain: Gain,
    ) -> None:
        """Wrap what `make_sums` is given; in the first captured step all leaves in `step`, in one message a dtype."""
        super().__init__(stacks, fused=True)
        self._placement, self._runtime, self._wire, self._gain = placement, runtime, wire, gain
        self._lock = Lock()  # the hooks of each device have a thread of their own
        self._travels: list[_Travel] = []
        self._arrives = False  # between `travel` and the end of `arrived`
        self._formed = False  # whether there is a queue of their own, in which they may leave early
        self._closed: tuple[float, float | Tensor] = (1.0, 1.0)
        self._counts = dict.fromkeys(self._members, 0)
        self._seen: dict[str, deque[int]] = {name: deque(maxlen=_MEMORY) for name in self._members}
        self._pause = self._caution = 0
        self._clock = Clock()
        self._measured, self._news = 0, False
        self._ready = dict.fromkeys(self._members, inf)
        self._begin()

    def _begin(self) -> None:
        """Begin the next captured step."""
        self._travels.clear()
        self._arrives = False
        self._counts = dict.fromkeys(self._members, 0)
        self._expected = {name: _usual(seen) for name, seen in self._seen.items()}
        names = [[member.layer.name for _, member in message.members] for message in self._messages]
        self._index = {name: index for index, own in enumerate(names) for name in own}
        self._missing = [sum(self._expected[name] != 0 for name in own) for own in names]

    @property
    def departed(self) -> int:
        """See `Sums.departed`."""
        return len(self._travels)

    # --- In the backward pass -----------------------------------------------------------------------------------

    def counted(self, layer: str, passes: int) -> None:
        """Send what has become complete by this gradient; see `Sums.counted`."""
        with self._lock:
            self._counts[layer] += 1
            if self._measured < _MEASURED:
                self._clock.stamp(layer, self._members[layer][0].device)
            index = self._index[layer]
            if index < len(self._travels):
                self._travels[index].late = True
            elif self._counts[layer] == self._expected[layer]:
                self._missing[index] -= 1
                if self._formed and not self._pause:
                    self._send_complete(passes)

    def _send_complete(self, passes: int) -> None:
        gain = self._gain(passes)
        while len(self._travels) < len(self._messages) and not self._missing[len(self._travels)]:
            message = self._messages[len(self._travels)]
            for _, member in message.members:
                self._pack(member.layer.name)
            copy = message.twin()
            copy.close(self.tallies, 1.0, gain)
            self._travels.append(self._post(copy, gain))

    def _post(self, message: Message, gain: float | Tensor) -> _Travel:
        group = self._runtime.background
        posted = self._runtime.post_sum(message.allocate(), message.kinds, self._wire, group)
        return _Travel(message, posted, gain)

    def reset(self) -> None:
        """Begin anew: what has left since the last step was of passes that are thrown away."""
        super().reset()
        if self._arrives:
            self._begin()
        for travel in self._travels:
            travel.late = True

    # --- In the step --------------------------------------------------------------------------------------------

    def close(self, share: float, gain: float | Tensor) -> None:
        """Take what was not known when messages left; see `Sums.close`."""
        for layer in list(self._open):
            self._pack(layer)
        self._closed = share, gain
        for travel in self._travels:
            same = share == 1.0 and (not travel.message.scaled or _equal(gain, travel.gain))
            travel.late = travel.late or not same

    def travel(self, runtime: Runtime, wire: torch.dtype | None) -> None:
        """Send what has not left yet, and again what has left too soon on any rank; `arrived` waits for it.

        Args:
            runtime: The ranks.
            wire: That given to `make_sums`.
        """
        late = [travel.late for travel in self._travels]
        wrong = self._agree([*late, *[False] * (len(self._messages) - len(late))])
        share, gain = self._closed
        for index, message in enumerate(self._messages):
            early = index < len(self._travels)
            if early and not wrong[index]:
                message.release()
            elif not early:
                # Where another rank has sent what is wrong, it waits for the others, whatever they send.
                own = message.blank() if wrong[index] else message
                if own is message:
                    own.close(self.tallies, share, gain)
                self._travels.append(self._post(own, gain))
        for index, message in enumerate(self._messages):
            if wrong[index]:
                message.close(self.tallies, share, gain)
                before, self._travels[index] = self._travels[index], self._post(message, gain)
                self._travels[index].before = before.posted
        self._arrives = self._formed = True
        self._learn(wrong=any(late))

    def _agree(self, late: list[bool]) -> list[bool]:
        """Return which of the messages that have left were wrong on any rank; tell when layers were ready meanwhile."""
        names = list(self._members) if self._measured < _MEASURED else []
        times = self._clock.read() if names else {}
        told = [*map(float, late), *(times.get(name, 0.0) for name in names), *(float(name in times) for name in names)]
        heard = iter(self._runtime.totals(told, "schedule"))
        wrong = [next(heard) > 0 for _ in late]
        totals = [next(heard) for _ in names]
        for name, total, users in zip(names, totals, heard, strict=True):
            if users:
                self._ready[name] = min(self._ready[name], total / users)
                self._news = True
        self._measured += self._news
        return wrong

    def _learn(self, *, wrong: bool) -> None:
        """Expect what this step has shown; after a wrong guess nothing leaves early for a while, longer every time."""
        for name, count in self._counts.items():
            self._seen[name].append(count)
        if wrong:
            self._caution = min(2 * self._caution + 1, _PATIENCE)
            self._pause = self._caution
        elif self._pause:
            self._pause -= 1
        else:
            self._caution //= 2

    def of(self, layer: str) -> dict[str, Tensor]:
        """Return the sums of a layer: those of this rank, and once they have traveled those of all."""
        if not self._arrives:
            return super().of(layer)
        index = self._index[layer]
        self._wait(index)
        return self._travels[index].message.views[layer]

    def _wait(self, last: int) -> None:
        """Wait for all messages up to one: on all ranks in the same order."""
        for travel in self._travels[: last + 1]:
            travel.wait()

    def arrived(self) -> Iterator[Arrived]:
        """Wait for one message after the other, and yield its sums: the next ones travel meanwhile."""
        for travel in self._travels:
            travel.wait()
            yield from travel.message.arrived()
            travel.message.release()
        if self._news:
            self._lay_out_anew()
        self._begin()

    def _lay_out_anew(self) -> None:
        """Fuse the layers in the order in which they were ready, as the first rank knows it: to the last bit."""
        self._news = False
        mine = [time if self._runtime.rank == 0 else 0.0 for time in self._ready.values()]
        self._ready = dict(zip(self._ready, self._runtime.totals(mine, "schedule"), strict=True))
        last = max((ready for ready in self._ready.values() if ready < inf), default=0.0)
        names = sorted(self._members, key=lambda name: self._ready[name])
        ready = [min(self._ready[name], last) for name in names]
        layers = [self._members[name] for name in names]
        alone = [Message(neighbours([layer])) for layer in layers]
        sizes = [
            one.numel * narrower(self._wire, layer[0].dtype).itemsize for one, layer in zip(alone, layers, strict=True)
        ]
        kinds = [(stack.dtype, stack.device) for stack, _ in layers]
        messages = fuse(
            ready,
            sizes,
            kinds,
            link=self._placement.link,
            bucket=self._placement.bucket,
            ranks=self._runtime.ranks,
        )
        self._lay_out([neighbours(layers[own.start : own.stop]) for own in messages])

    def abandon(self) -> None:
        """Send what the other ranks may wait for, and wait for what has left; collective."""
        if self._formed and not self._arrives:
            for message in self._messages[len(self._travels) :]:
                self._travels.append(self._post(message.blank(), 1.0))
        for travel in self._travels:
            travel.wait()


def _usual(counts: Sequence[int]) -> int:
    """Return the most frequent of some numbers, the larger of equally frequent ones; -1 if there are none."""
    return max(counts, key=lambda count: (counts.count(count), count), default=-1)


def _equal(left: float | Tensor, right: float | Tensor) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return not isinstance(left, Tensor) and not isinstance(right, Tensor) and left == right


class Clock:
    """When layers were last captured, in seconds: the host's, and on accelerators those of the device."""

    def __init__(self) -> None:
        """Begin with none."""
        self._stamps: dict[torch.device, dict[str, _Stamp]] = {}

    def stamp(self, layer: str, device: torch.device) -> None:
        """Note the time of a layer."""
        stamp: _Stamp = perf_counter()
        if device.type == "cuda":
            stamp = torch.cuda.Event(enable_timing=True)
            stamp.record(torch.cuda.current_stream(device))
        self._stamps.setdefault(device, {})[layer] = stamp

    def read(self) -> dict[str, float]:
        """Return the seconds of each layer since the first one on its device, and forget them; this waits for it."""
        seconds: dict[str, float] = {}
        for stamps in self._stamps.values():
            some = next(iter(stamps.values()))
            own = {layer: _between(some, stamp) for layer, stamp in stamps.items()}
            first = min(own.values())
            seconds.update({layer: time - first for layer, time in own.items()})
        self._stamps.clear()
        return seconds


def _between(start: _Stamp, end: _Stamp) -> float:
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    start.synchronize()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
