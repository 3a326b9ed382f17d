"""The messages that ranks exchange: standard collectives on flat buckets, whose bytes are counted.

All messages of the library are of five kinds: a sum on all ranks, sums that go to their owners, results that owners
share, rows that all ranks gather, and rows that change hands without a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from natgrad.distributed import groups
from natgrad.distributed.slices import Slices
from natgrad.distributed.wire import WireFormat, cut, narrower
from natgrad.errors import NatgradError

# Numbers of one owner: values that may travel narrow, and counters that never do.
Owned = tuple[Tensor, Tensor]


class Work:
    """A message under way.

    Attributes:
        whole: Whether waiting for it sends nothing more, so that one rank may do so alone.
    """

    def __init__(
        self, runtime: Communicator, work: dist.Work | None = None, finish: Callable[[], None] | None = None
    ) -> None:
        """Wrap the `work` to wait for, and what all ranks have to `finish` together afterwards."""
        self._runtime, self._work, self._finish = runtime, work, finish
        self.whole = finish is None

    def wait(self) -> None:
        """Wait until the result is there; a second time there is nothing to wait for."""
        if self._work is not None:
            with self._runtime.talking():
                self._work.wait()
        if self._finish is not None:
            self._finish()
        self._work = self._finish = None
        self.whole = True

    def drop(self) -> None:
        """Wait until the message may be forgotten; all ranks leave out alike what would follow it."""
        self._finish = None
        self.wait()


class Communicator:
    """Messages within one process group; with a single rank every call is free.

    Attributes:
        group: The process group; None: this process alone.
        rank: This process's rank in the group.
        ranks: P.
        seconds: Host seconds spent in collectives.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Join `group`; communicates nothing."""
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.ranks = dist.get_world_size(group) if group is not None else 1
        self.seconds = 0.0
        self._sent: dict[str, float] = {}
        self._known: dict[groups.Key, dist.ProcessGroup | None] = {}

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent so far, by kind of message."""
        return {kind: round(sent) for kind, sent in self._sent.items()}

    def count(self, kinds: Mapping[str, float], weight: float = 1.0) -> None:
        """Count `weight` bytes for each element of some kinds that this rank has sent."""
        for kind, elements in kinds.items():
            self._sent[kind] = self._sent.get(kind, 0.0) + elements * weight

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
            groups.forget(self.group)
            raise NatgradError(
                f"rank {self.rank} of {self.ranks} could not exchange its message: another rank has probably stopped, "
                f"and its own error tells why; {error}"
            ) from error
        finally:
            self.seconds += perf_counter() - started

    # --- Process groups -----------------------------------------------------------------------------------------

    def subgroup(self, ranks: Sequence[int], purpose: str = "") -> dist.ProcessGroup | None:
        """Return the group of some ranks, this one among them; made once, by all ranks together, each its own.

        Args:
            ranks: The ranks, in rising order.
            purpose: What it is for; groups of the same ranks for different purposes have queues of their own.
        """
        key = tuple(ranks), purpose
        if self.group is None or (len(key[0]) == self.ranks and not purpose):
            return self.group
        if key not in self._known:
            offers = self.everywhere(groups.offer(self.group, key))
            with self.talking():
                self._known[key] = groups.subgroup(self.group, key, offers)
        return self._known[key]

    @property
    def background(self) -> dist.ProcessGroup | None:
        """A group of all ranks whose messages do not stand in the queue of others; made once, by all together."""
        return self.subgroup(range(self.ranks), "background")

    # --- Objects and numbers ------------------------------------------------------------------------------------

    def everywhere(self, value: Any) -> list[Any]:
        """Return what each rank has, anything picklable with its tensors on the host; collective."""
        found: list[Any] = [value]
        if self.ranks > 1:
            found *= self.ranks
            with self.talking():
                dist.all_gather_object(found, value, group=self.group)
        return found

    def any(self, flag: bool) -> bool:
        """Return whether any rank says so; this waits."""
        return self.totals([float(flag)], "counters")[0] > 0

    def totals(self, numbers: Sequence[float], kind: str) -> list[float]:
        """Return some numbers summed over the ranks in float32, counted as of some kind; this waits."""
        if self.ranks == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float32, device=groups.device_of(self.group))
        self.sum_(total, {kind: len(total)})
        summed: list[float] = total.tolist()
        return summed

    # --- A sum on all ranks -------------------------------------------------------------------------------------

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
    ) -> Work:
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
            return Work(self)
        with self.talking():
            return Work(self, dist.all_reduce(message, group=group, async_op=True))

    def _post_narrow(
        self, message: Tensor, kinds: dict[str, int], wire: torch.dtype, group: dist.ProcessGroup | None
    ) -> Work:
        """Sum by reduce-scatter and all-gather of narrow numbers, each rank summing its piece in the message's dtype.

        The sum of a piece is rounded once, by the rank that made it, which keeps what the others receive: all ranks
        end with the same bits.
        """
        kind, counters = next(iter(kinds)), kinds.get("counters", 0)
        halves = message.split([len(message) - counters, counters])
        narrow, wide = (cut(half, self.ranks) for half in halves)
        layout = WireFormat(wide=wide.shape[1], narrow=narrow.shape[1], dtype=message.dtype, wire=wire)
        counted = layout.wide * message.element_size()
        self.count({kind: layout.payload - counted, "counters": counted}, 2 * (self.ranks - 1))
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

        return Work(self, scattered, finish)

    def post_sum_as(self, message: Tensor, kinds: dict[str, int], wire: torch.dtype) -> Work:
        """Begin to sum what `message` is in a dtype: no rank waits for more than that the others have begun.

        (In a narrow dtype `post_sum` rounds less where there are many ranks, but sends more when it is waited for.) Two
        ranks gather their numbers, and sum them in the message's dtype; of more the partial sums are rounded, too.

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
            return Work(self, work, lambda: _write(message, codes))
        both = codes.new_empty(2 * len(codes))
        with self.talking():
            work = _all_gather(both, codes, self.group, async_op=True)
        other = both[len(codes) * (1 - self.rank) :][: len(codes)]
        return Work(self, work, lambda: _write(message, codes, other))

    # --- Sums that go to their owners, results that owners share ------------------------------------------------

    def reduce_to_owners(
        self, values: Sequence[Tensor], counters: Sequence[Tensor], kind: str, wire: torch.dtype | None = None
    ) -> Owned:
        """Return the sums, over all ranks, of the numbers that this rank owns.

        A reduce-scatter of even slices, each of which begins with numbers of its own rank; then the surplus of ranks
        that own more than a slice holds goes to them (`Slices`). Sums are made in the dtype of the numbers.

        Args:
            values: For each rank what this one adds to its sums: vectors of one dtype, at least float32, on one device.
            counters: The same of numbers that never travel narrow.
            kind: What the values are counted as; the counters are "counters".
            wire: The dtype in which values travel, if narrower than their own.

        Returns:
            The sums of the values and of the counters.
        """
        rank, narrow, wide = self.rank, Slices(_lengths(values)), Slices(_lengths(counters))
        layout = _layout(values[0].dtype, wire, values=narrow.length, counters=wide.length)
        rows = layout.empty(self.ranks, values[0].device)
        own = values[0], counters[0]
        for index, pair in enumerate(zip(narrow.cut(values), wide.cut(counters), strict=True)):
            own = pair if index == rank else own  # as exact as it is: it need not travel
            layout.write(rows[index : index + 1], pair[1][None], [pair[0][None]])
        self._count(layout, kind, self.ranks - 1)
        own = self._reduce_scatter(rows, layout, own)
        if not (narrow.is_even and wide.is_even):
            peers = range(self.ranks)
            runs = [(own[0][narrow.in_slice(peer, rank)], own[1][wide.in_slice(peer, rank)]) for peer in peers]
            sizes = [(_size(narrow.of_owner(rank, peer)), _size(wide.of_owner(rank, peer))) for peer in peers]
            found = self._exchange_runs(runs, sizes, layout, kind, self.group)
        else:
            found = []
        return (
            torch.cat([own[0][narrow.first(rank)], *(run for run, _ in found)]),
            torch.cat([own[1][wide.first(rank)], *(run for _, run in found)]),
        )

    def share_from_owners(
        self,
        own: Owned,
        sizes: Sequence[tuple[int, int]],
        kind: str,
        *,
        ranks: Sequence[int],
        wire: torch.dtype | None = None,
    ) -> list[Owned]:
        """Give what each of some ranks owns to all of them: `reduce_to_owners` the other way round, without sums.

        The surplus of ranks that own more than an even slice is spread over the slices of others; then all ranks
        gather the slices. An owner keeps what the others receive, so that all ranks end with the same bits.

        Args:
            own: The values and counters of this rank, vectors of one dtype, at least float32, on one device.
            sizes: How many values and counters each of the ranks owns.
            kind: What the values are counted as; the counters are "counters".
            ranks: Those that take part, this one among them, in rising order.
            wire: The dtype in which values travel, if narrower than their own.

        Returns:
            The values and counters of each of the ranks.
        """
        if len(ranks) == 1:
            return [own]
        group, rank = self.subgroup(ranks), ranks.index(self.rank)
        narrow, wide = (Slices(tuple(pair[index] for pair in sizes)) for index in range(2))
        layout = _layout(own[0].dtype, wire, values=narrow.length, counters=wide.length)
        if not (narrow.is_even and wide.is_even):
            peers = range(len(ranks))
            runs = [(own[0][narrow.of_owner(rank, peer)], own[1][wide.of_owner(rank, peer)]) for peer in peers]
            counts = [(_size(narrow.in_slice(peer, rank)), _size(wide.in_slice(peer, rank))) for peer in peers]
            found = self._exchange_runs(runs, counts, layout, kind, group)
        else:
            found = []
        row = layout.empty(1, own[0].device)
        values = narrow.fill([own[0][narrow.first(rank)], *(run for run, _ in found)])
        counters = wide.fill([own[1][wide.first(rank)], *(run for _, run in found)])
        layout.write(row, counters[None], [values[None]])
        arrived = layout.empty(len(ranks), own[0].device)
        self._count(layout, kind, len(ranks) - 1)
        with self.talking():
            _all_gather(arrived, row, group)
        all_counters, all_values = layout.read(arrived)
        return list(zip(narrow.join(list(all_values)), wide.join(list(all_counters)), strict=True))

    def _reduce_scatter(self, rows: Tensor, layout: WireFormat, own: Owned) -> Owned:
        """Return the sums of the slice of this rank, of which `own` is what it adds itself.

        Gloo's reduce-scatter sends as many bytes as an all-reduce, and cannot sum numbers that are narrower than what
        they are summed in: there the slices change hands, and each rank sums its own.
        """
        if layout.lossless and rows.device.type == "cuda":
            summed = torch.empty_like(rows[:1])
            with self.talking():
                _sum_rows(summed.view(layout.dtype), rows.view(layout.dtype), self.group)
            counters, values = layout.read(summed)
            return values[0], counters[0]
        arrived = torch.empty_like(rows)
        with self.talking():
            dist.all_to_all_single(arrived, rows, group=self.group)
        counters, values = layout.read(arrived)
        values[self.rank], counters[self.rank] = own
        return values.sum(0), counters.sum(0)

    def _exchange_runs(
        self,
        runs: Sequence[Owned],
        sizes: Sequence[tuple[int, int]],
        layout: WireFormat,
        kind: str,
        group: dist.ProcessGroup | None,
    ) -> list[Owned]:
        """Send each rank of a group a run of values and counters, and receive one of these `sizes` from each."""
        sent, splits = [], []
        for values, counters in runs:
            own = layout.resized(values=len(values), counters=len(counters))
            message = own.empty(1, values.device)
            if own.size:
                own.write(message, counters[None], [values[None]])
            self._count(own, kind, 1)
            sent.append(message[0])
            splits.append(own.size)
        layouts = [layout.resized(values=values, counters=counters) for values, counters in sizes]
        expected = [own.size for own in layouts]
        arrived = torch.empty(sum(expected), dtype=torch.uint8, device=runs[0][0].device)
        with self.talking():
            dist.all_to_all_single(arrived, torch.cat(sent), expected, splits, group=group)
        found = []
        for own, message in zip(layouts, arrived.split(expected), strict=True):
            if own.size:
                counters, values = own.read(message[None])
                found.append((values[0], counters[0]))
            else:
                found.append((runs[0][0][:0], runs[0][1][:0]))
        return found

    def _count(self, layout: WireFormat, kind: str, copies: int) -> None:
        counted = layout.wide * layout.dtype.itemsize
        self.count({kind: layout.payload - counted, "counters": counted}, copies)

    # --- Rows that all ranks gather, and rows that change hands -------------------------------------------------

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

    def redistribute(
        self, outgoing: Sequence[Tensor], sizes: Sequence[int], *, ranks: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Send a vector to each of some ranks, and receive one from each; the caller counts them.

        Args:
            outgoing: What each of `ranks` is sent, vectors of one dtype and device.
            sizes: How many numbers come from each.
            ranks: Those that take part, this one among them, in rising order; None: all.

        Returns:
            The vectors that came from each.
        """
        group = self.subgroup(range(self.ranks) if ranks is None else ranks)
        sent = torch.cat(list(outgoing))
        arrived = sent.new_empty(sum(sizes))
        with self.talking():
            dist.all_to_all_single(arrived, sent, list(sizes), [len(vector) for vector in outgoing], group=group)
        return list(arrived.split(list(sizes)))

    def broadcast_(self, messages: Iterable[tuple[int, Tensor, dict[str, int]]]) -> None:
        """Send each message from its owner to all others, all at once: the owner sends (P - 1) times its elements.

        Args:
            messages: Triples of the owner's rank, the message, and its elements by kind.
        """
        works = []
        for owner, message, kinds in messages if self.ranks > 1 else ():
            assert self.group is not None
            if owner == self.rank:
                self.count(kinds, message.element_size() * (self.ranks - 1))
            with self.talking():
                source = dist.get_global_rank(self.group, owner)
                works.append(Work(self, dist.broadcast(message, src=source, group=self.group, async_op=True)))
        for posted in works:
            posted.wait()


def _layout(dtype: torch.dtype, wire: torch.dtype | None, *, values: int, counters: int) -> WireFormat:
    return WireFormat(wide=counters, narrow=values, dtype=dtype, wire=narrower(wire, dtype))


def _lengths(vectors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(len(vector) for vector in vectors)


def _size(run: slice) -> int:
    size: int = run.stop - run.start
    return size


def _write(message: Tensor, *addends: Tensor) -> None:
    """Write the sum of narrow numbers, in the message's own dtype."""
    if addends[0] is not message:
        message.copy_(addends[0])
    for addend in addends[1:]:
        message.add_(addend)


def _all_gather(arrived: Tensor, message: Tensor, group: dist.ProcessGroup | None, **options: Any) -> Any:
    """Collect the messages of all ranks: torch's call, by the name that it has in this version."""
    return getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(arrived, message, group=group, **options)


def _sum_rows(summed: Tensor, rows: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum each rank's row there: torch's call, by the name that it has in this version."""
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(summed, rows, group=group)


def flatten(tensors: list[Tensor]) -> Tensor:
    """Return one contiguous message that holds `tensors` end to end."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(message: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return views of `message` shaped like the tensors that `flatten` was given."""
    pieces = message.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
