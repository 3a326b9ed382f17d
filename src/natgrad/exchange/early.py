"""Gradients that leave for their workers while the backward pass goes on.

A parameter's gradient can leave once the last backward pass of the step has accumulated into it. No wrapper tells which
that is for all ways to train, so each rank expects what it has seen: as many accumulations as mostly came in the steps
before, over all micro-batches. So it is the last micro-batch whose gradients leave, with ``no_sync`` and without it,
under DistributedDataParallel and under no wrapper.

That is a guess, on which nothing but time depends. What leaves early is a copy, of addends that are not weighted yet:
the worker weighs them, by the samples that `step` tells. In `step` each rank compares its copies with its gradients as
they are now, bit by bit, and tells the others in the message of the counters. What a ``GradScaler`` has unscaled
meanwhile, its worker unscales too; whatever else is not the same (gradients that were clipped or thrown away, later
passes) this rank sends again. All ranks post the same messages in the same order: early ones by their number, each no
sooner than the one before, and in `step` the rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from threading import Lock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from natgrad.exchange.routes import Kind, Route, routes
from natgrad.exchange.vectors import Size, Swap, nbytes
from natgrad.habit import Caution, Expected
from natgrad.layers import Handle, remove_all
from natgrad.numerics.precision import at_least_float32
from natgrad.placement import Link, Runtime, cut, flatten
from natgrad.stacks.blocks import Stack

# What a rank tells of each message: it holds what it should; it does once unscaled; it does not.
RIGHT, SCALED, WRONG = range(3)
# The most messages in which gradients leave: more would hide no more than a few percent of them.
_MOST = 16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Message:
    """The gradients of some parameters, under way to those that sum them.

    Attributes:
        route: Who sums what of them.
        indices: Which of the trained parameters they are.
        early: Whether it has left in the backward pass.
        wrong: Whether it has turned out to hold what it should not.
    """

    def __init__(self, route: Route, indices: list[int], runtime: Runtime, group: dist.ProcessGroup | None) -> None:
        """Wrap what is given, with the group in whose queue it will stand; nothing is sent."""
        self.route, self.indices = route, indices
        self.early = self.wrong = False
        self._runtime, self._group = runtime, group
        self._sizes = route.sizes  # read now, as all ranks know them: whatever becomes of the parameters
        self._swap: Swap | None = None

    def expect(self) -> None:
        """Expect what the other ranks send, before any of them does."""
        if self._swap is None:
            (device, dtype), me = self.route.kind, self._runtime.rank
            expected: list[list[Size]] = [[(self._sizes[me], dtype)] for _ in self._sizes]
            expected[me] = []
            self._swap = Swap(self._runtime, expected, device, self._group)

    def post(self, *, early: bool, blank: bool = False) -> None:
        """Send the gradients as they are now.

        Args:
            early: Whether that may be too soon.
            blank: Whether to send zeros: others wait for a message, whatever it holds.
        """
        assert self._swap is not None
        device, dtype = self.route.kind
        zeros = [[torch.zeros(size, dtype=dtype, device=device)] for size in self._sizes] if blank else None
        outgoing = self.route.addends() if zeros is None else zeros
        outgoing[self._runtime.rank] = []
        self.early = early
        self._runtime.count({"gradients": sum(map(nbytes, outgoing))})
        self._swap.send(outgoing)

    @property
    def posted(self) -> bool:
        """Whether it has been sent in this step."""
        return self._swap is not None and self._swap.sent is not None

    def compare(self, addends: Sequence[Sequence[Tensor]], unscale: Tensor | None) -> Tensor:
        """Return whether what has left is `RIGHT`, `SCALED` or `WRONG`, without waiting for the device.

        Args:
            addends: What was to leave.
            unscale: What gradients were multiplied by since, if by anything.
        """
        device, dtype = self.route.kind
        assert self._swap is not None
        assert self._swap.sent is not None
        own = [tensor for rank, tensors in enumerate(addends) if rank != self._runtime.rank for tensor in tensors]
        if not self.early or not own:
            return torch.full((), RIGHT, dtype=torch.uint8, device=device)
        sent, now = self._swap.sent.view(dtype), flatten(own)
        if unscale is not None:
            sent = rescaled(sent, unscale.to(device))
        bits = _BITS[dtype.itemsize]
        same = RIGHT if unscale is None else SCALED
        return torch.where((sent.view(bits) != now.view(bits)).any(), WRONG, same).to(torch.uint8)

    def wait(self) -> list[Tensor]:
        """Wait until it has arrived; return the addends of each rank to this one's sums, of this one nothing."""
        assert self._swap is not None
        device, dtype = self.route.kind
        arrived = self._swap.wait()
        self._swap = None
        return [vectors[0] if vectors else torch.empty(0, dtype=dtype, device=device) for vectors in arrived]


def rescaled(addends: Tensor, factor: Tensor) -> Tensor:
    """Return addends times a factor, rounded as ``GradScaler.unscale_`` rounds them."""
    wide = at_least_float32(addends.dtype)
    return (addends.to(wide) * factor.to(wide)).to(addends.dtype)


class Early:
    """What leaves early of the gradients of a model.

    Attributes:
        messages: In the order in which they leave. Empty where one message in `step` is as good, and until the first
            rank has told in which order gradients come.
        listens: Whether passes are a step's; those of a second pass over a batch are not.
    """

    def __init__(self, runtime: Runtime, link: Link) -> None:
        """Begin without a model; no hook is set before the first step.

        Args:
            runtime: The ranks.
            link: What messages cost.
        """
        self._runtime, self._link = runtime, link
        self._lock = Lock()  # the hooks of each device have a thread of their own
        self._handles: list[Handle] = []
        self._trained: list[tuple[object, ...]] = []
        self._parameters: list[nn.Parameter] = []
        self._stacks: Sequence[Stack] = ()
        self._count = 1
        self._order: dict[int, None] = {}  # in which gradients have come in this step
        self._watched = False  # whether the hooks have seen all of this step
        self.listens = True
        self.messages: list[Message] = []
        self._index: dict[int, int] = {}
        self._missing: list[int] = []
        self._expected: Expected[int] = Expected(())
        self._caution = Caution()
        weakref.finalize(self, remove_all, self._handles).atexit = False

    # --- In the backward pass -----------------------------------------------------------------------------------

    @torch.no_grad()
    def came(self, index: int) -> None:
        """Note that a pass has accumulated into a gradient, and send what is complete."""
        # One of another shape than was laid out waits, with all behind it, for the step, which follows.
        if not self.listens or self._parameters[index].shape != self._trained[index][1]:
            return
        with self._lock:
            self._order.pop(index, None)
            self._order[index] = None
            self._expected.counts[index] += 1
            if not self._expected.complete(index) or not self.messages:
                return
            self._missing[self._index[index]] -= 1
            if self._caution.waits:
                return
            for message, missing in zip(self.messages, self._missing, strict=True):
                if missing:
                    return
                if not message.posted:
                    self._post(message, early=True)

    # --- In the step --------------------------------------------------------------------------------------------

    def follow(self, trained: Sequence[nn.Parameter], stacks: Sequence[Stack]) -> None:
        """Follow what has happened to the model since the last step: the same on all ranks.

        Args:
            trained: Its trained parameters, in its order.
            stacks: Its covered layers.
        """
        state: list[tuple[object, ...]] = [(id(p), p.shape, p.device, p.dtype) for p in trained]
        if state == self._trained and stacks is self._stacks:
            return
        self._abandon()
        self.detach()
        self._trained, self._parameters, self._stacks = state, list(trained), stacks
        self.messages, self._watched, self._order = [], False, {}
        self._expected, self._caution = Expected(range(len(trained))), Caution()
        # A message is worth its latency if its bytes take as long.
        ranks, link = self._runtime.ranks, self._link
        seconds = sum(map(_nbytes, trained)) * (ranks - 1) / ranks / link.bandwidth
        self._count = int(min(_MOST, seconds / link.latency if link.latency else _MOST))
        if self._count > 1:
            for index, parameter in enumerate(trained):
                self._handles.append(parameter.register_post_accumulate_grad_hook(_Notice(self, index)))

    def send_rest(self) -> None:
        """Send what has not left yet."""
        for message in self.messages:
            if not message.posted:
                self._post(message, early=False)

    def _post(self, message: Message, *, early: bool, blank: bool = False) -> None:
        """Send a message; with the first of a step the others are expected too."""
        for one in self.messages:
            one.expect()
        message.post(early=early, blank=blank)

    def settle(self) -> None:
        """End the step: learn of it, and begin the next."""
        if self._count <= 1:
            return
        if not self.messages and self._watched:
            self._lay_out()
        self._watched = True
        self._expected.learn()
        self._caution.learn(wrong=any(message.wrong for message in self.messages))
        self._begin()

    def _begin(self) -> None:
        self._order = {}
        self._expected.begin()
        expected = self._expected.totals
        self._missing = [sum(expected[index] != 0 for index in message.indices) for message in self.messages]

    def _lay_out(self) -> None:
        """Make messages of gradients that come together, in the order in which the first rank has seen them come."""
        runtime, n = self._runtime, len(self._parameters)
        order = {index: place for place, index in enumerate(self._order, start=1)} if runtime.rank == 0 else {}
        places = runtime.totals([float(order.get(index, 0)) for index in range(n)], "schedule")
        if not any(places):
            return
        indices = sorted(range(n), key=lambda index: (places[index] == 0, places[index], -index))
        parts = cut([_nbytes(self._parameters[index]) for index in indices], self._count)
        together: dict[tuple[int, Kind], list[int]] = {}
        for index, part in zip(indices, parts, strict=True):
            parameter = self._parameters[index]
            together.setdefault((part, (parameter.device, parameter.dtype)), []).append(index)
        for own in together.values():
            (route,) = routes([self._parameters[index] for index in own], self._stacks, runtime.ranks)
            self.messages.append(Message(route, own, runtime, runtime.background))
        self._index = {index: place for place, message in enumerate(self.messages) for index in message.indices}

    def _abandon(self) -> None:
        """Send what other ranks may wait for, and wait for what has left; collective."""
        for message in self.messages:
            if not message.posted:
                self._post(message, early=False, blank=True)
        for message in self.messages:
            message.wait()

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        remove_all(self._handles)


class _Notice:
    """Tells of the accumulations into one gradient; neither copied nor pickled with the parameter."""

    def __init__(self, early: Early, index: int) -> None:
        self._early, self._index = weakref.ref(early), index

    def __call__(self, parameter: Tensor) -> None:
        early = self._early()
        if early is not None:
            early.came(self._index)


def _nbytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()
