"""The collectives: a thin layer over ``torch.distributed`` that counts what it sends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from natgrad.aside import aside
from natgrad.errors import NatgradError
from natgrad.placement.lending import Groups, device_of
from natgrad.placement.posted import Exchange, Posted
from natgrad.placement.wire import Layout, cut, narrower


class Runtime:
    """Messages within one process group; with a single rank every call is free.

    Attributes:
        group: The process group; None: this process alone.
        rank: This process's rank in the group.
        ranks: P.
        groups: Those of some of the ranks.
        seconds: Host seconds spent in collectives.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Join `group`; communicates nothing."""
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.ranks = dist.get_world_size(group) if group is not None else 1
        self.groups = Groups(group)
        self.seconds = 0.0
        self._sent: dict[str, float] = {}
        self._known: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(self.ranks)): group}
        self._background: dist.ProcessGroup | None = None

    def close(self) -> None:
        """Give back the groups that this one has used; it may be used again, and borrows others then."""
        self._known, self._background = {tuple(range(self.ranks)): self.group}, None
        self.groups.give_back()

    def aside(self) -> AbstractContextManager[None]:
        """Count what is sent meanwhile for nobody."""
        return aside(self, _sent=dict(self._sent), seconds=self.seconds)

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent so far, by kind of message."""
        return {kind: round(sent) for kind, sent in self._sent.items()}

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Count the seconds of collectives; where one fails, say what has probably happened.

        Every collective of this library is called within. A rank that waits for one that has stopped is told when the
        connection breaks, at the latest after the timeout of its process group.

        Raises:
            NatgradError: in place of the backend's error, which it is raised from.
        """
        started = perf_counter()
        try:
            yield
        except RuntimeError as error:
            self.groups.forget()
            raise NatgradError(
                f"rank {self.rank} of {self.ranks} could not exchange its message: another rank has probably stopped, "
                f"and its own error tells why; {error}"
            ) from error
        finally:
            self.seconds += perf_counter() - started

    def everywhere(self, value: Any) -> list[Any]:
        """Return what each rank has, anything picklable with its tensors on the host; collective."""
        found: list[Any] = [value]
        if self.ranks > 1:
            found *= self.ranks
            with self.talking():
                dist.all_gather_object(found, value, group=self.group)
        return found

    def sum_(self, message: Tensor, kinds: dict[str, int], wire: torch.dtype | None = None) -> None:
        """Sum `message` over the ranks, in place: 2 (P - 1) / P of its elements are sent by each.

        Args:
            message: A contiguous vector of the same size on every rank.
            kinds: How many of its elements are of which kind, for `traffic`.
            wire: The dtype in which all but its last elements travel, "counters" and what is audited, if narrower than
                their own.
        """
        self.post_sum(message, kinds, wire, self.group).wait()

    def post_sum(
        self, message: Tensor, kinds: dict[str, int], wire: torch.dtype | None, group: dist.ProcessGroup | None
    ) -> Posted:
        """Begin what `sum_` does: `message` is not to be touched until what is returned was waited for.

        Args:
            message: As in `sum_`.
            kinds: As in `sum_`.
            wire: As in `sum_`.
            group: In whose queue the message stands: that of the ranks, or `background`.
        """
        if self.ranks > 1 and narrower(wire, message.dtype) != message.dtype:
            return self._post_narrow(message, kinds, narrower(wire, message.dtype), group)
        self.count(kinds, message.element_size() * 2 * (self.ranks - 1) / self.ranks)
        if self.ranks == 1:
            return Posted(self)
        with self.talking():
            return Posted(self, dist.all_reduce(message, group=group, async_op=True), group)

    def _post_narrow(
        self, message: Tensor, kinds: dict[str, int], wire: torch.dtype, group: dist.ProcessGroup | None
    ) -> Posted:
        """Sum by reduce-scatter and all-gather of narrow numbers, each rank summing its piece in the message's dtype.

        The sum of a piece is rounded once, by the rank that made it, which keeps what the others receive: all ranks
        end with the same bits.
        """
        kind, audited = next(iter(kinds)), kinds.get("audit", 0)
        counters = kinds.get("counters", 0) + audited
        halves = message.split([len(message) - counters, counters])
        narrow, wide = (cut(half, self.ranks) for half in halves)
        layout = Layout(wide=wide.shape[1], narrow=narrow.shape[1], dtype=message.dtype, wire=wire)
        counted = layout.wide * message.element_size()
        own = {"audit": audited * message.element_size() / self.ranks} if audited else {}
        rest = {kind: layout.payload - counted, "counters": counted - sum(own.values())}
        self.count({**rest, **own}, 2 * (self.ranks - 1))
        sent = layout.empty(self.ranks, message.device)
        layout.write(sent, wide, [narrow])
        arrived = torch.empty_like(sent)
        with self.talking():
            scattered = dist.all_to_all_single(arrived, sent, group=group, async_op=True)

        def finish() -> None:
            counts, values = layout.read(arrived)
            values[self.rank] = narrow[self.rank]  # the own ones have not travelled
            own = layout.empty(1, message.device)
            layout.write(own, counts.sum(0, keepdim=True), [values.sum(0, keepdim=True)])
            with self.talking():
                _all_gather(arrived, own, group)
            for half, summed in zip(halves, reversed(layout.read(arrived)), strict=True):
                half.copy_(summed.flatten()[: len(half)])

        return Posted(self, scattered, group, finish)

    def post_sum_as(self, message: Tensor, kinds: dict[str, int], wire: torch.dtype) -> Posted:
        """Begin to sum what `message` is in a dtype: no rank waits for more than that the others have begun.

        (In a narrow dtype `post_sum` rounds less where there are many ranks, but sends more when it is waited for.) Two
        ranks exchange their numbers, and sum them in the message's dtype; of more the partial sums are rounded, too.

        Args:
            message: As in `sum_`; what travels is rounded, what stays is not until the sum is there.
            kinds: As in `sum_`.
            wire: The dtype, narrower than the message's or its own.
        """
        codes = message.to(wire)
        self.count(kinds, codes.element_size() * 2 * (self.ranks - 1) / self.ranks)
        if self.ranks != 2:
            with self.talking():
                work = dist.all_reduce(codes, group=self.group, async_op=True)
            return Posted(self, work, self.group, lambda: _write(message, codes))
        sizes = [0 if rank == self.rank else codes.nbytes for rank in range(2)]
        exchange = Exchange(self, sizes, codes.device, self.group)
        exchange.send(codes.view(torch.uint8), sizes)
        return Posted(self, finish=lambda: _write(message, codes, exchange.wait()[1 - self.rank].view(wire)))

    def sum_to_(self, messages: Sequence[tuple[int, Tensor, dict[str, int]]], wire: torch.dtype | None = None) -> None:
        """Sum each message over all ranks, in place, on one of them; on the others it stays as it is.

        Every rank sends its addends to the rank that sums them, in the message's dtype: a reduce-scatter of uneven
        pieces, which not every backend has, and whose sums would be as narrow as its wire. (P - 1) times a message's
        elements travel.

        Args:
            messages: The rank that sums it, a contiguous vector, and its elements by kind, "counters" last; all of one
                dtype and device, the same on every rank.
            wire: The dtype in which all but "counters" travel, if narrower than their own.
        """
        outgoing: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        mine: list[tuple[Tensor, Layout]] = []
        for rank, message, kinds in messages:
            counters = kinds.get("counters", 0)
            layout = Layout.tail(len(message), counters, message.dtype, narrower(wire, message.dtype))
            if rank == self.rank:
                mine.append((message, layout))
                continue
            outgoing[rank].append(layout.encode(message))
            kind, counted = next(iter(kinds)), counters * message.element_size()
            self.count({kind: layout.payload - counted, "counters": counted})
        sizes = [layout.encoded for _, layout in mine]
        expected = [0 if rank == self.rank else sum(sizes) for rank in range(self.ranks)]
        for arrived in self.exchange(outgoing, expected, messages[0][1].device):
            if len(arrived):
                for (message, layout), row in zip(mine, arrived.split(sizes), strict=True):
                    layout.add_to_(message, row)

    def exchange(
        self,
        outgoing: Sequence[Sequence[Tensor]],
        sizes: Sequence[int],
        device: torch.device,
        ranks: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Send bytes to each of some ranks and receive some from each, in one message.

        Args:
            outgoing: For each of `ranks` the tensors of bytes that it is sent.
            sizes: How many bytes come from each.
            device: Where they are.
            ranks: Those that take part, this one among them; None: all.

        Returns:
            The bytes that came from each.
        """
        exchange = Exchange(self, sizes, device, self.subgroup(range(self.ranks) if ranks is None else ranks))
        exchange.send(*joined(outgoing, device))
        return exchange.wait()

    def any(self, flag: bool) -> bool:
        """Tell whether any rank says so; this waits."""
        return self.totals([float(flag)], "counters")[0] > 0

    def totals(self, numbers: Sequence[float], kind: str) -> list[float]:
        """Return some numbers summed over the ranks in float32, counted as of some kind; this waits."""
        if self.ranks == 1:
            return list(numbers)
        said = torch.tensor(numbers, dtype=torch.float32, device=device_of(self.group))
        self.sum_(said, {kind: len(said)})
        summed: list[float] = said.tolist()
        return summed

    def subgroup(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Return the group of some ranks, this one among them; borrowed once, by all ranks together, each its own."""
        key = tuple(ranks)
        if key not in self._known:
            self._known[key] = self._borrow(key)
        return self._known[key]

    @property
    def background(self) -> dist.ProcessGroup | None:
        """A group of all ranks whose messages do not stand in the queue of others; borrowed once, by all together."""
        if self._background is None and self.ranks > 1:
            self._background = self._borrow(range(self.ranks))
        return self._background

    def _borrow(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        offers = self.everywhere(self.groups.offer(ranks))
        with self.talking():
            return self.groups.borrow(ranks, offers)

    def broadcast_(
        self, messages: Iterable[tuple[int, Tensor, dict[str, int]]], ranks: Sequence[int] | None = None
    ) -> None:
        """Send each message from its owner to all others, all at once: the owner sends (P - 1) times its elements.

        Args:
            messages: Triples of the owner's rank, the message, and its elements by kind.
            ranks: Those that take part, this one among them; None: all.
        """
        works: list[Posted] = []
        ranks = range(self.ranks) if ranks is None else ranks
        group = self.subgroup(ranks) if len(ranks) > 1 else None
        with self.talking():
            for owner, message, kinds in messages:
                if owner == self.rank:
                    self.count(kinds, message.element_size() * (len(ranks) - 1))
                if group is not None:
                    assert self.group is not None
                    source = dist.get_global_rank(self.group, owner)
                    work = dist.broadcast(message, src=source, group=group, async_op=True)
                    works.append(Posted(self, work, group))
        for posted in works:
            posted.wait()

    def gather(self, message: Tensor, kinds: dict[str, int], group: dist.ProcessGroup | None) -> Tensor:
        """Collect the messages of all S ranks of `group`, in its order: each sends (S - 1) times its elements.

        Args:
            message: A contiguous vector, of the same size on every rank.
            kinds: How many of its elements are of which kind, for `traffic`.
            group: Some of the ranks.

        Returns:
            ``[S, n]``.
        """
        ranks = dist.get_world_size(group)
        self.count(kinds, message.element_size() * (ranks - 1))
        arrived = message.new_empty(ranks * len(message))
        with self.talking():
            _all_gather(arrived, message, group)
        return arrived.view(ranks, -1)

    def count(self, kinds: Mapping[str, float], weight: float = 1.0) -> None:
        """Count `weight` bytes for each element of some kinds that this rank has sent."""
        for kind, elements in kinds.items():
            self._sent[kind] = self._sent.get(kind, 0.0) + elements * weight


def _write(message: Tensor, *addends: Tensor) -> None:
    """Write the sum of narrow numbers, in the message's own dtype."""
    if addends[0] is not message:
        message.copy_(addends[0])
    for addend in addends[1:]:
        message.add_(addend)


def _all_gather(arrived: Tensor, message: Tensor, group: dist.ProcessGroup | None) -> None:
    """Collect the messages of all ranks: torch's call, by the name that it has in this version."""
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(arrived, message, group=group)


def joined(outgoing: Sequence[Sequence[Tensor]], device: torch.device) -> tuple[Tensor, list[int]]:
    """Return a copy of all bytes end to end, and how many are each rank's."""
    pieces = [tensor for own in outgoing for tensor in own]
    sent = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=device)
    return sent, [sum(len(tensor) for tensor in own) for own in outgoing]


def flatten(tensors: list[Tensor]) -> Tensor:
    """Return one contiguous message that holds `tensors` end to end."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(message: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return views of `message` shaped like the tensors that `flatten` was given."""
    pieces = message.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
