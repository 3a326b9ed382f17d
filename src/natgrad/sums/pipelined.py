"""Sums that leave while the forward and the backward pass go on (SPD-KFAC, Shi 2021).

A layer's sums can leave once its last gradient of the step has come. No wrapper tells which that is, so each rank
expects what it has seen: as many gradients as mostly came in the steps before, over all micro-batches and all uses of a
weight. With accumulation it is hence the last micro-batch whose messages leave, under any wrapper and under none.

Those of the inputs alone, A of K-FAC, leave before: in the forward pass of the use whose gradient is expected to be the
last one. It is summed there and kept until that gradient comes, which takes it as it is. Where another comes, or none
(evaluation with gradients, unused branches, players of a game), it is dropped, and A is summed in the backward pass.
So it is from the start of layers with several uses in a pass, of token losses, whose masks only gradients tell, of
reentrant checkpoints and compiled graphs, which show no use before its gradient, and in evaluation mode.

All of that is a guess, on which nothing but time depends. What leaves early is a copy. `step` knows what is true, and
the ranks tell each other in a message of a few numbers which copies were right. Those that were not, for gradients that
came later or never, passes that were thrown away, masks or loss scales that only `step` knows, are sent again by all
ranks. Whatever happens on one rank, all post the same messages in the same order: early ones by their number, each no
sooner than the one before, and in `step` the rest.

After a wrong guess on gradients a rank sends nothing early for a while. After one on inputs, or a gradient that comes
without one, no rank sends anything in the forward pass for a while, and sums leave in the backward pass, A and G as one
(`forms.py`): messages of inputs that are late would hold up all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import and_
from threading import Lock

import torch
from torch import Tensor

from natgrad.habit import Caution, Expected
from natgrad.placement import Placement, Posted, Runtime
from natgrad.stacks.blocks import Stack
from natgrad.stacks.kept import pack
from natgrad.sums.clock import Clock, Item
from natgrad.sums.forms import form
from natgrad.sums.guesses import Guesses
from natgrad.sums.messages import Arrived, Message, Shares
from natgrad.sums.sums import ObserveInputs, Sums

Gain = Callable[[int], "float | Tensor"]

# Captured steps in which it is measured when layers are ready; the first is slower than those that follow.
_MEASURED = 3


def make_sums(
    stacks: Sequence[Stack],
    placement: Placement,
    runtime: Runtime,
    wire: torch.dtype | None,
    gain: Gain,
    riders: int = 0,
) -> Sums:
    """Return the sums of some stacks as a placement sends them.

    Args:
        stacks: The blocks.
        placement: The options.
        runtime: The ranks.
        wire: The dtype in which sums travel, if narrower than their own.
        gain: What `Sums.close` is given, by the number of backward passes.
        riders: Those of `Sums`; under "pipelined" they travel with what tells which messages were right.
    """
    if placement.name == "pipelined" and runtime.ranks > 1:
        return PipelinedSums(stacks, placement, runtime, wire, gain)
    return Sums(stacks, fused=runtime.ranks > 1, riders=riders if runtime.ranks > 1 else 0)


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

    It takes the memory of the sums twice, from when they leave to `step`; of what leaves in the forward pass once more
    for each layer until its gradient comes.
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
        self._closed: tuple[Shares, float | Tensor] = ({}, 1.0)
        self._heard: list[float] = []
        self._expected = Expected(self._members)
        self._guesses = Guesses()
        self._caution = Caution()  # of this rank alone
        self._foresight = Caution()  # in forward passes: the same on all ranks, for it decides on the messages
        self._clock = Clock()
        self._measured, self._news = 0, False
        items: list[Item] = [(name, "whole") for name in self._members]
        items += [(name, "early") for name, (stack, _) in self._members.items() if stack.curvature.early]
        self._ready = dict.fromkeys(items, inf)
        self._forms = self._messages, self._messages  # without what leaves in the forward pass, and with it
        self._begin()

    def carry(self, numbers: int) -> None:
        """Make no room: a message may have left before there is anything to put there."""

    def _begin(self) -> None:
        """Begin the next captured step."""
        self._travels.clear()
        self._arrives = False
        self._expected.begin()
        self._guesses.begin()
        self._arrange(self._forms[not self._foresight.waits])
        self._index: dict[str, list[int]] = {name: [] for name in self._members}
        for index, message in enumerate(self._messages):
            for name in message.places:
                self._index[name].append(index)
        totals = self._expected.totals
        self._missing = [{name for name in message.places if totals[name] != 0} for message in self._messages]

    @property
    def departed(self) -> int:
        """See `Sums.departed`."""
        return len(self._travels)

    # --- In the forward pass ------------------------------------------------------------------------------------

    def foresees(self, layer: str) -> bool:
        """See `Sums.foresees`: that whose gradient is expected to be the layer's last one of the step."""
        if layer not in self._members:  # it keeps rows
            return False
        stack, _ = self._members[layer]
        waits = self._arrives or self._caution.waits or self._foresight.waits
        if waits or not stack.curvature.early or not self._expected.last(layer) or self._guesses.pending(layer):
            return False
        first = self._index[layer][0]
        return first >= len(self._travels) if self._messages[first].early else self._measured < _MEASURED

    def foresee(self, layer: str, use: object, observe: ObserveInputs, passes: int) -> None:
        """Send what has become complete by this use; see `Sums.foresee`."""
        sums = self._summed(layer, observe)
        with self._lock:
            self._guesses.make(layer, use, sums)
            if self._measured < _MEASURED:
                self._clock.stamp((layer, "early"), self._members[layer][0].device)
            first = self._index[layer][0]
            if self._messages[first].early and first >= len(self._travels):
                self._missing[first].discard(layer)
                self._send_complete(passes)

    def _summed(self, layer: str, observe: ObserveInputs) -> Mapping[str, Tensor]:
        """Return the early sums of one use, packed."""
        stack, member = self._members[layer]
        whole = {
            spec.name: torch.empty(member.stop - member.start, *spec.shape, dtype=stack.dtype, device=stack.device)
            for spec in stack.statistics
            if spec.name in stack.curvature.early
        }
        observe(whole)
        return {spec.name: pack(whole.pop(spec.name), spec) for spec in stack.statistics if spec.name in whole}

    def _foreseen(self, layer: str, use: object) -> Mapping[str, Tensor]:
        return self._guesses.prove(layer, use)

    # --- In the backward pass -----------------------------------------------------------------------------------

    def counted(self, layer: str, passes: int) -> None:
        """Send what has become complete by this gradient; see `Sums.counted`."""
        with self._lock:
            self._expected.counts[layer] += 1
            if self._measured < _MEASURED:
                self._clock.stamp((layer, "whole"), self._members[layer][0].device)
            complete = self._expected.complete(layer)
            for index in self._index[layer]:
                if index >= len(self._travels):
                    if complete:
                        self._missing[index].discard(layer)
                elif not (complete and self._messages[index].early and layer in self._guesses.proven):
                    self._travels[index].late = True
            if complete:
                self._send_complete(passes)

    def _send_complete(self, passes: int) -> None:
        if not self._formed or self._caution.waits:
            return
        gain = self._gain(passes)
        while len(self._travels) < len(self._messages) and not self._missing[len(self._travels)]:
            message = self._messages[len(self._travels)]
            self._pack_all(message)
            copy = message.twin()
            copy.close(self.tallies, {}, gain)
            if copy.early:
                for layer in copy.places:
                    for name, guess in self._guesses.of(layer).items():
                        copy.views[layer][name].add_(guess)
            self._travels.append(self._post(copy, gain))

    def _post(self, message: Message, gain: float | Tensor) -> _Travel:
        group = self._runtime.background
        posted = self._runtime.post_sum(message.allocate(), message.kinds, self._wire, group)
        return _Travel(message, posted, gain)

    def reset(self) -> None:
        """Begin anew: what has left since the last step was of passes that are thrown away."""
        super().reset()
        for layer in self._guesses.drop():
            self._clock.forget((layer, "early"))
            self._missing[self._index[layer][0]].add(layer)
        if self._arrives:
            self._begin()
        for travel in self._travels:
            travel.late = True

    # --- In the step --------------------------------------------------------------------------------------------

    def close(self, shares: Shares, gain: float | Tensor) -> None:
        """Take what was not known when messages left; see `Sums.close`."""
        self._pack_rest()
        self._closed = shares, gain
        unproven = self._guesses.drop()
        for layer in unproven:
            self._clock.forget((layer, "early"))
        for travel in self._travels:
            own = travel.message
            shared = not own.shared or all(shares.get(name, 1.0) == 1.0 for name in own.places)
            scaled = not own.scaled or _equal(gain, travel.gain)
            sound = not own.early or unproven.isdisjoint(own.places)
            travel.late = travel.late or not (shared and scaled and sound)

    def travel(self, runtime: Runtime, wire: torch.dtype | None) -> None:
        """Send what has not left yet, and again what has left too soon on any rank; `arrived` waits for it.

        Args:
            runtime: The ranks.
            wire: That given to `make_sums`.
        """
        wrong = self._agree([travel.late for travel in self._travels])
        shares, gain = self._closed
        for index, message in enumerate(self._messages):
            early = index < len(self._travels)
            if early and not wrong[index]:
                message.release()
            elif not early:
                # Where another rank has sent what is wrong, it waits for the others, whatever they send.
                own = message.blank() if wrong[index] else message
                if own is message:
                    own.close(self.tallies, shares, gain)
                self._travels.append(self._post(own, gain))
        for index, message in enumerate(self._messages):
            if wrong[index]:
                message.close(self.tallies, shares, gain)
                before, self._travels[index] = self._travels[index], self._post(message, gain)
                self._travels[index].before = before.posted
        self._arrives = self._formed = True

    def _agree(self, late: list[bool]) -> list[bool]:
        """Return which of the messages that have left were wrong on any rank; tell when layers were ready meanwhile."""
        late += [False] * (len(self._messages) - len(late))
        items = list(self._ready) if self._measured < _MEASURED else []
        times = self._clock.read() if items else {}
        told = [*map(float, late), float(self._surprised()), *self.rider]
        told += [*(times.get(item, 0.0) for item in items), *(float(item in times) for item in items)]
        heard = iter(self._runtime.totals(told, "schedule"))
        wrong, surprised = [next(heard) > 0 for _ in late], next(heard) > 0
        self._heard = [next(heard) for _ in self.rider]
        totals = [next(heard) for _ in items]
        for item, total, users in zip(items, totals, heard, strict=True):
            if users:
                self._ready[item] = min(self._ready[item], total / users, key=abs)
                self._news = True
        self._measured += self._news
        early = [message.early for message in self._messages]
        self._foresight.learn(wrong=surprised or any(map(and_, wrong, early)))
        self._caution.learn(wrong=any(own and not before for own, before in zip(late, early, strict=True)))
        self._expected.learn()
        return wrong

    @property
    def heard(self) -> list[float]:
        """See `Sums.heard`."""
        return self._heard

    def _surprised(self) -> bool:
        """Tell whether gradients came of uses that were to be foreseen and were not: their messages hold up others."""
        waiting = {layer for message in self._messages if message.early for layer in message.places}
        counts, proven = self._expected.counts, self._guesses.proven
        return not self._caution.waits and any(counts[layer] and layer not in proven for layer in waiting)

    def of(self, layer: str) -> dict[str, Tensor]:
        """Return the sums of a layer: those of this rank, and once they have traveled those of all."""
        if not self._arrives:
            return super().of(layer)
        self._wait(self._index[layer][-1])
        views: dict[str, Tensor] = {}
        for index in self._index[layer]:
            views |= self._travels[index].message.views[layer]
        return views

    def _wait(self, last: int) -> None:
        """Wait for all messages up to one: on all ranks in the same order."""
        for travel in self._travels[: last + 1]:
            travel.wait()

    def arrived(self) -> Iterator[Arrived]:
        """Wait for one message after the other, and yield its sums: the next ones travel meanwhile."""
        early: dict[str, Message] = {}
        for travel in self._travels:
            travel.wait()
            if travel.message.early:
                early |= dict.fromkeys(travel.message.places, travel.message)
                continue
            yield from travel.message.arrived(early)
            travel.message.release()
        for message in early.values():
            message.release()
        if self._news:
            self._form_anew()
        self._begin()

    def _form_anew(self) -> None:
        """Fuse the layers in the order in which they were ready, as the first rank knows it: to the last bit."""
        self._news = False
        mine = [time if self._runtime.rank == 0 else 0.0 for time in self._ready.values()]
        self._ready = dict(zip(self._ready, self._runtime.totals(mine, "schedule"), strict=True))
        self._forms = form(
            self._members, self._ready, placement=self._placement, ranks=self._runtime.ranks, wire=self._wire
        )

    def abandon(self) -> None:
        """Send what the other ranks may wait for, and wait for what has left; collective."""
        if self._formed and not self._arrives:
            for message in self._messages[len(self._travels) :]:
                self._travels.append(self._post(message.blank(), 1.0))
        for travel in self._travels:
            travel.wait()


def _equal(left: float | Tensor, right: float | Tensor) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return not isinstance(left, Tensor) and not isinstance(right, Tensor) and left == right
