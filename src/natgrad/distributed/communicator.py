"""The messages between ranks: standard collectives on flat buckets, with counts of the bytes sent.

There are five kinds: sums on all ranks, sums on their owners, results that owners share, rows that all ranks gather,
and rows that are redistributed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from natgrad.distributed.buckets import Slices, WireFormat, narrower
from natgrad.errors import LostRankError
from natgrad.linalg.device import on_host
from natgrad.profiling import profiled

# The ranks within the whole group, and the purpose: each purpose has a separate queue of messages.
GroupKey = tuple[tuple[int, ...], str]
# The bytes of a piece of a long message.
_PIECE = 2**18
# The purpose of the messages of hosts.
_HOST = "host"
# That of groups of which each has a single user; a number follows.
_PRIVATE = "private"

_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[GroupKey, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
# By world, the highest number used so far. Addresses of destroyed groups stay in the store, so numbers are not reused.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def is_lost(error: BaseException) -> bool:
    """Return whether an exception says that a collective has failed."""
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error))


class Work:
    """A message that is being sent, which is kept until it has arrived."""

    def __init__(
        self,
        runtime: Communicator,
        kind: str,
        message: Tensor,
        work: dist.Work | None = None,
        finish: Callable[[], Any] | None = None,
    ) -> None:
        """Wrap the `work` that sends a `message`, and a function that then returns its result and may be collective."""
        self._runtime, self._kind, self._message, self._work, self._finish = runtime, kind, message, work, finish

    def wait(self) -> Any:
        """Wait for the result, and return it; further calls do nothing."""
        if self._work is not None:
            with self._runtime.collective(self._kind):
                self._work.wait()
        result = None if self._finish is None else self._finish()
        self._work = self._finish = None
        return result

    def then(self, finish: Callable[[Any], Any]) -> Work:
        """Return this message with a further step, which gets the result and may be collective."""
        first, self._finish = self._finish, lambda: finish(None if first is None else first())
        return self

    def drop(self) -> None:
        """Wait until the message may be freed, without its result; all ranks must call it."""
        self._finish = None
        self.wait()


class Communicator:
    """The messages within one process group. A single rank sends nothing.

    Attributes:
        group: The process group. None: a single process.
        rank: The rank of this process in the group.
        ranks: The number of ranks, P.
        seconds: Host seconds spent in collectives.
        call: The call of the user that sends messages, for errors.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.ranks = dist.get_world_size(group) if group is not None else 1
        self.seconds = 0.0
        self.call = ""
        self._sent: dict[str, float] = {}
        self._known: dict[GroupKey, dist.ProcessGroup] = {}

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent so far, by kind of message."""
        return {kind: round(sent) for kind, sent in self._sent.items()}

    def count(self, kind: str, sent: float) -> None:
        """Count bytes as sent by this rank, by kind of message."""
        self._sent[kind] = self._sent.get(kind, 0.0) + sent

    @contextmanager
    def collective(self, kind: str) -> Iterator[None]:
        """Measure the host seconds of a collective, and explain its errors. All collectives are called in it.

        A profile shows it by its kind (`natgrad.profiling`).

        If another rank has stopped, the backend raises when the connection breaks, at the latest after the timeout of
        the process group.
        """
        started = perf_counter()
        try:
            with profiled(f"send.{kind}"):
                yield
        except RuntimeError as error:
            raise self.explained(error) from error
        finally:
            self.seconds += perf_counter() - started

    def _run(self, kind: str, post: Callable[[], dist.Work]) -> None:
        """Start a collective and wait for its result."""
        with self.collective(kind):
            post().wait()

    def explained(self, error: RuntimeError) -> LostRankError:
        """Return an error that names this rank and its call, after `error` of the backend."""
        forget_subgroups(self.group)
        call = f" in {self.call}" if self.call else ""
        return LostRankError(
            f"rank {self.rank} of {self.ranks} could not exchange its message{call}: another rank has probably "
            f"stopped, or skipped a step(), or trains other parameters, see the error there; {error}"
        )

    # --- Process groups -----------------------------------------------------------------------------------------

    def subgroup(self, ranks: Sequence[int], purpose: str = "") -> dist.ProcessGroup | None:
        """Return the process group of some ranks, ascending and including this one.

        The first call for a group is collective over all ranks, each of which passes the ranks of its group. Groups of
        the same ranks with different purposes have separate queues.
        """
        key = tuple(ranks), purpose
        if self.group is None or (len(key[0]) == self.ranks and not purpose):
            return self.group
        if key not in self._known:
            kept = _kept.setdefault(self.group, {})
            found = self.all_gather_objects((key in kept, max(_group_count(), _numbers.get(_world(), -1) + 1)))
            with self.collective("objects"):
                if not all(found[rank][0] for rank in ranks):
                    members = [dist.get_global_rank(self.group, rank) for rank in ranks]
                    kept[key] = _make(members, self.group, max(number for _, number in found), on_host=purpose == _HOST)
            self._known[key] = kept[key]
        return self._known[key]

    @property
    def background(self) -> dist.ProcessGroup | None:
        """A group of all ranks whose messages do not wait for those of other groups; the first access is collective."""
        return self.subgroup(range(self.ranks), "background")

    def new_group(self) -> dist.ProcessGroup | None:
        """Return another such group, which nothing else uses; collective."""
        known = {} if self.group is None else _kept.get(self.group, {})
        number = sum(purpose.startswith(_PRIVATE) for _, purpose in known)
        return self.subgroup(range(self.ranks), f"{_PRIVATE} {number}")

    # --- Objects and numbers ------------------------------------------------------------------------------------

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the value of each rank, any picklable object whose tensors are on the host; collective."""
        found = [value] * self.ranks
        if self.ranks > 1:
            with self.collective("objects"):
                dist.all_gather_object(found, value, group=self.group)
        return found

    def any(self, flag: bool) -> bool:
        """Return whether the flag of any rank is True; collective and synchronous."""
        return self.totals([float(flag)], "counters")[0] > 0

    def any_on_host(self, flag: bool) -> bool:
        """Return whether the flag of any rank is True; collective. The host does not wait for an accelerator."""
        on_host = self.group is None or device_of(self.group).type == "cpu"
        group = self.group if on_host else self.subgroup(range(self.ranks), _HOST)
        found = torch.tensor([float(flag)])
        self._run("counters", lambda: dist.all_reduce(found, group=group, async_op=True))
        return bool(found > 0)

    def totals(self, numbers: Sequence[float], kind: str) -> list[float]:
        """Return numbers summed over the ranks in float32; `kind` as in `traffic`; collective and synchronous."""
        if self.ranks == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float32, device=device_of(self.group))
        self.sum_(total, kind)
        summed: list[float] = total.tolist()
        return summed

    # --- A sum on all ranks -------------------------------------------------------------------------------------

    def sum_(self, message: Tensor, kind: str) -> None:
        """Sum a contiguous vector over the ranks in place. Each rank sends 2 (P - 1) / P times its elements."""
        self.post_sum(message, kind, None, self.group).wait()

    def post_sum(
        self,
        message: Tensor,
        kind: str,
        wire: torch.dtype | None,
        group: dist.ProcessGroup | None,
        *,
        finishes_alone: bool = False,
    ) -> Work:
        """Start `sum_` in the queue of a group. Do not use `message` before ``wait()``.

        Numbers are sent in the dtype `wire` if it is narrower; with `finishes_alone` in one collective, so that
        ``wait()`` is not collective. For more than two ranks this rounds more.
        """
        narrow = narrower(wire, message.dtype)
        if self.ranks > 1 and narrow != message.dtype:
            post = self._post_rounded if finishes_alone else self._post_narrow
            return post(message, kind, narrow, group)
        if self.ranks == 1:
            return Work(self, kind, message)
        self.count(kind, message.nbytes * 2 * (self.ranks - 1) / self.ranks)
        with self.collective(kind):
            return Work(self, kind, message, dist.all_reduce(message, group=group, async_op=True))

    def _post_narrow(self, message: Tensor, kind: str, wire: torch.dtype, group: dist.ProcessGroup | None) -> Work:
        """Sum by reduce-scatter and all-gather of narrow numbers; each rank sums its piece in the message's dtype.

        All ranks use the rounded sum of a piece, also the rank that made it, and so have the same bits.
        """
        length = -(-len(message) // self.ranks)
        pieces = pad(message, (0, self.ranks * length - len(message))).view(self.ranks, length)
        layout = _layout(message.dtype, wire, length)
        self.count(kind, 2 * (self.ranks - 1) * layout.payload)
        sent = layout.empty(self.ranks, message.device)
        layout.write(sent, pieces)
        arrived = torch.empty_like(sent)
        with self.collective(kind):
            scattered = dist.all_to_all_single(arrived, sent, group=group, async_op=True)

        def finish() -> None:
            _, values = layout.read(arrived)
            values[self.rank] = pieces[self.rank]  # unrounded
            piece = layout.empty(1, message.device)
            layout.write(piece, values.sum(0, keepdim=True))
            self._run(kind, lambda: _all_gather(arrived, piece, group))
            message.copy_(layout.read(arrived)[1].flatten()[: len(message)])

        return Work(self, kind, message, scattered, finish)

    def _post_rounded(self, message: Tensor, kind: str, wire: torch.dtype, group: dist.ProcessGroup | None) -> Work:
        """Sum in one collective: two ranks gather rounded numbers; with more ranks, partial sums are also rounded."""
        codes = message.to(wire)
        self.count(kind, codes.nbytes * 2 * (self.ranks - 1) / self.ranks)
        with self.collective(kind):
            if self.ranks > 2:
                work = dist.all_reduce(codes, group=group, async_op=True)
                return Work(self, kind, message, work, lambda: message.copy_(codes))
            both = codes.new_empty(2, len(codes))
            work = _all_gather(both.view(-1), codes, group)
            return Work(self, kind, message, work, lambda: message.copy_(both[0]).add_(both[1]))

    # --- Sums that go to their owners, results that owners share ------------------------------------------------

    def post_to_owners(
        self, vectors: Sequence[Tensor], kind: str, wire: torch.dtype | None, group: dist.ProcessGroup | None
    ) -> Work:
        """Start to sum, over all ranks, the numbers of each owner in `vectors`, in the queue of a group.

        ``wait()`` is collective, and returns the sum of the numbers that this rank owns. A reduce-scatter of even
        slices, each of which begins with numbers of the rank that receives it. Ranks that own more than a slice then
        receive their surplus from other ranks (`Slices`). Sums have the dtype of the numbers, which are sent in the
        dtype `wire` if it is narrower.
        """
        slices, own = Slices(tuple(map(len, vectors))), vectors[0]
        layout = _layout(own.dtype, wire, slices.length)
        rows = layout.empty(self.ranks, own.device)
        for rank, part in enumerate(slices.cut(vectors)):
            own = part if rank == self.rank else own  # not sent, and so not rounded
            layout.write(rows[rank : rank + 1], part[None])
        self.count(kind, (self.ranks - 1) * layout.payload)
        scattered = self._post_reduce_scatter(rows, layout, own, kind, group)

        def finish(summed: Tensor) -> Tensor:
            found = self._move_surplus(summed, slices, layout, kind, range(self.ranks), to_owners=True)
            return torch.cat([summed[slices.first(self.rank)], *found])

        return scattered.then(finish)

    def post_from_owners(
        self,
        owned: Tensor,
        sizes: Sequence[int],
        kind: str,
        *,
        ranks: Sequence[int],
        wire: torch.dtype | None = None,
        padded: bool = False,
    ) -> Work:
        """Start to send each of some `ranks` the vectors of all of them, of these `sizes`; ``wait()`` returns them.

        This reverses `post_to_owners`, without sums. Ranks that own more than an even slice send their surplus to the
        slices of others, before this returns, or all slices are `padded`; then all ranks gather the slices. Owners also
        use the rounded values, so that all ranks have the same bits.
        """
        if len(ranks) == 1:
            return Work(self, kind, owned, finish=lambda: [owned])
        slices = Slices(tuple(sizes), padded)
        layout = _layout(owned.dtype, wire, slices.length)
        found = self._move_surplus(owned, slices, layout, kind, ranks, to_owners=False)
        row, arrived = (layout.empty(count, owned.device) for count in (1, len(ranks)))
        layout.write(row, slices.fill([owned[slices.first(ranks.index(self.rank))], *found])[None])
        self.count(kind, (len(ranks) - 1) * layout.payload)
        members = self.subgroup(ranks)
        posted = self._in_pieces(kind, arrived, row, lambda into, piece: _all_gather(into.view(-1), piece[0], members))
        return posted.then(lambda _: slices.join(list(layout.read(arrived)[1])))

    def _post_reduce_scatter(
        self, rows: Tensor, layout: WireFormat, own: Tensor, kind: str, group: dist.ProcessGroup | None
    ) -> Work:
        """Start the sum of this rank's slice, to which it adds its unrounded numbers `own`.

        Gloo's reduce-scatter sends as many bytes as an all-reduce, and every reduce-scatter sums in the dtype that it
        sends. On the host and for narrow dtypes, an all-to-all is used instead, and each rank sums its slice.
        """
        if layout.lossless and not on_host(rows):
            piece = torch.empty_like(rows[:1])
            # The name of the function depends on torch's version.
            sum_rows = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
            numbers = piece.view(layout.dtype), rows.view(layout.dtype)
            with self.collective(kind):
                work = sum_rows(*numbers, group=group, async_op=True)
            return Work(self, kind, rows, work, lambda: layout.read(piece)[1][0])
        arrived = torch.empty_like(rows)

        def finish(_: object) -> Tensor:
            values = layout.read(arrived)[1]
            values[self.rank] = own
            return values.sum(0)

        post = partial(dist.all_to_all_single, group=group, async_op=True)
        return self._in_pieces(kind, arrived, rows, post).then(finish)

    def _in_pieces(
        self, kind: str, arrived: Tensor, rows: Tensor, post: Callable[[Tensor, Tensor], dist.Work | None]
    ) -> Work:
        """Start to send rows of bytes ``[R, n]`` so that `arrived` ``[P, n]`` is complete after ``wait()``.

        Gloo sends and receives a long message in turn, short ones at once; so it gets several of some columns.
        """
        if not on_host(rows) or rows.shape[1] <= _PIECE:
            with self.collective(kind):
                return Work(self, kind, rows, post(arrived, rows))
        pieces = []
        for columns, target in zip(rows.split(_PIECE, 1), arrived.split(_PIECE, 1), strict=True):
            sent, into = columns.contiguous(), torch.empty_like(target, memory_format=torch.contiguous_format)
            with self.collective(kind):
                work = post(into, sent)
            pieces.append(Work(self, kind, sent, work, partial(target.copy_, into)))
        return Work(self, kind, rows, finish=lambda: [piece.wait() for piece in pieces])

    def _move_surplus(
        self,
        source: Tensor,
        slices: Slices,
        layout: WireFormat,
        kind: str,
        ranks: Sequence[int],
        *,
        to_owners: bool,
    ) -> list[Tensor]:
        """Send the surplus to its owners, or to the slices that it fills, and return the received numbers."""
        if slices.is_even:
            return []
        place, peers = ranks.index(self.rank), range(len(ranks))
        filled = [slices.surplus(peer, place)[1] for peer in peers]
        owned = [slices.surplus(place, peer)[0] for peer in peers]
        outgoing, incoming = (filled, owned) if to_owners else (owned, filled)
        messages = []
        for run in outgoing:
            part = replace(layout, narrow=run.stop - run.start)
            message = part.empty(1, source.device)
            if part.size:
                part.write(message, source[run][None])
            self.count(kind, part.payload)
            messages.append(message[0])
        parts = [replace(layout, narrow=run.stop - run.start) for run in incoming]
        arrived = self.post_redistribute(messages, [part.size for part in parts], kind, ranks=ranks).wait()
        return [part.read(message[None])[1][0] for part, message in zip(parts, arrived, strict=True) if part.size]

    # --- Rows that all ranks gather, and rows that move to other ranks ------------------------------------------

    def gather(self, message: Tensor, kind: str) -> Tensor:
        """Return the messages ``[P, n]`` of all ranks; each rank sends (P - 1) times its n elements."""
        self.count(kind, message.nbytes * (self.ranks - 1))
        arrived = message.new_empty(self.ranks * len(message))
        self._run(kind, lambda: _all_gather(arrived, message, self.group))
        return arrived.view(self.ranks, -1)

    def post_redistribute(
        self, outgoing: Sequence[Tensor], sizes: Sequence[int], kind: str, *, ranks: Sequence[int] | None = None
    ) -> Work:
        """Start to send a vector to each of `ranks` (None: all); ``wait()`` returns those received, of these `sizes`.

        All vectors have one dtype and device. The caller counts the bytes.
        """
        group = self.subgroup(range(self.ranks) if ranks is None else ranks)
        sent = torch.cat(list(outgoing))
        arrived = sent.new_empty(sum(sizes))
        lengths = [len(vector) for vector in outgoing]
        if on_host(sent):
            return self._exchange(sent.split(lengths), arrived.split(list(sizes)), kind, group)
        with self.collective(kind):
            work = dist.all_to_all_single(arrived, sent, list(sizes), lengths, group=group, async_op=True)
        return Work(self, kind, sent, work, lambda: list(arrived.split(list(sizes))))

    def _exchange(
        self, outgoing: Sequence[Tensor], arrived: Sequence[Tensor], kind: str, group: dist.ProcessGroup | None
    ) -> Work:
        """Start to send a vector to each rank of a group, and to receive those of the others in `arrived`, in pieces.

        Gloo sends and receives a long message in turn, short ones at once.
        """
        assert group is not None
        own, ranks = dist.get_rank(group), len(outgoing)
        works: list[dist.Work | None] = []
        with self.collective(kind):
            for step in range(1, ranks):  # each rank begins with another one
                target, source = (own + step) % ranks, (own - step) % ranks
                sender, receiver = (dist.get_global_rank(group, rank) for rank in (source, target))
                works += [dist.irecv(piece, sender, group) for piece in _split(arrived[source])]
                works += [dist.isend(piece, receiver, group) for piece in _split(outgoing[target])]
        arrived[own].copy_(outgoing[own])
        pieces = [Work(self, kind, outgoing[own], work) for work in works]

        def finish() -> list[Tensor]:
            for piece in pieces:
                piece.wait()
            return list(arrived)

        return Work(self, kind, outgoing[own], finish=finish)

    def broadcast_(self, messages: Iterable[tuple[int, Tensor]], kind: str) -> None:
        """Broadcast messages, each with its owner's rank, in place. An owner sends (P - 1) times its elements."""
        works = []
        for owner, message in messages if self.ranks > 1 else ():
            assert self.group is not None
            if owner == self.rank:
                self.count(kind, message.nbytes * (self.ranks - 1))
            with self.collective(kind):
                source = dist.get_global_rank(self.group, owner)
                work = dist.broadcast(message, src=source, group=self.group, async_op=True)
                works.append(Work(self, kind, message, work))
        for posted in works:
            posted.wait()


def _layout(dtype: torch.dtype, wire: torch.dtype | None, length: int) -> WireFormat:
    return WireFormat(narrow=length, dtype=dtype, wire=narrower(wire, dtype))


def _all_gather(arrived: Tensor, message: Tensor, group: dist.ProcessGroup | None) -> Any:
    """Gather the messages of all ranks into `arrived`; the name of the function depends on torch's version."""
    return getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(arrived, message, group=group, async_op=True)


def _split(vector: Tensor) -> Sequence[Tensor]:
    """Return a vector in pieces of at most `_PIECE` bytes; none if it is empty."""
    return vector.split(_PIECE // vector.element_size()) if len(vector) else ()


def flatten(tensors: list[Tensor]) -> Tensor:
    """Return one contiguous vector with the elements of `tensors`."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(message: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return views of `message` with the shapes of the tensors `like`."""
    pieces = message.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


# --- Process groups -----------------------------------------------------------------------------------------------


def forget_subgroups(group: dist.ProcessGroup | None) -> None:
    """Drop the cached subgroups of `group`, or of its whole group, because their queues are stuck after an error."""
    for whole, known in list(_kept.items()):
        if whole is group or group in known.values():
            known.clear()


def subgroup_of_world(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a group of some ranks of the world; collective over these ranks."""
    known, key = _kept.setdefault(_world(), {}), (tuple(ranks), "mesh")
    if key not in known:
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        known[key] = group
    return known[key]


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device from which a group sends small messages."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of a group, which new subgroups do not inherit; None: the default of its backend."""
    options = getattr(group._get_backend(device_of(group)), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def _make(ranks: list[int], like: dist.ProcessGroup, number: int, *, on_host: bool) -> dist.ProcessGroup:
    """Make a group of some ranks of the world; collective over these ranks.

    Torch then names the group by the number of groups that a process is in. Ranks that are in fewer groups first make
    spare ones, so that all use the same name.
    """
    backend, timeout = "gloo" if on_host else dist.get_backend(like), timeout_of(like)
    spare = [
        dist.new_group([dist.get_rank()], backend=backend, timeout=timeout, use_local_synchronization=True)
        for _ in range(number - _group_count())
    ]
    made = dist.new_group(ranks, backend=backend, timeout=timeout, use_local_synchronization=True)
    for group in spare:
        dist.destroy_process_group(group)
    _numbers[_world()] = number
    assert isinstance(made, dist.ProcessGroup)
    return made


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _group_count() -> int:
    return len(dist.distributed_c10d._world.pg_names)
