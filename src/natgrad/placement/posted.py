"""Messages under way: what is posted goes on beside other work until it is waited for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from natgrad.placement.runtime import Runtime

# Messages between two ranks have tags: these are beyond those that users, and torch itself, give to theirs.
_TAGS = range(2**30, 2**31 - 1)
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Posted:
    """A message under way.

    Attributes:
        whole: Whether waiting for it sends nothing more, so that one rank may do so alone.
    """

    def __init__(
        self,
        runtime: Runtime,
        work: dist.Work | None = None,
        group: dist.ProcessGroup | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Wrap the `work` to wait for, in which `group`, and what all ranks have to `finish` together afterwards."""
        self._runtime, self._work, self._finish = runtime, work, finish
        self.whole = finish is None
        if work is not None:
            runtime.groups.posted(work, group)

    def wait(self) -> None:
        """Wait until the result is there; a second time there is nothing to wait for."""
        if self._work is not None:
            with self._runtime.talking():
                self._work.wait()
            self._runtime.groups.done(self._work)
        if self._finish is not None:
            self._finish()
        self._work = self._finish = None
        self.whole = True

    def drop(self) -> None:
        """Wait until the message may be forgotten; all ranks leave out alike what would follow it."""
        self._finish = None
        self.wait()


class Exchange:
    """Bytes from each rank of a group to each other: what is to arrive is expected before anything is sent.

    A rank of gloo sends to those alone who have told that they expect something, and tells so in the queue of what it
    sends itself. Were that behind a long message, the link would idle in the other direction meanwhile; as it is in an
    all-to-all of gloo's, which sends first. Other backends do all of it in one call, when it is sent.
    """

    def __init__(
        self, runtime: Runtime, sizes: Sequence[int], device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        """Expect bytes, in the order in which all ranks of a group do.

        Args:
            runtime: Counts the seconds.
            sizes: How many come from each rank of the group, in its order; from this one what it sends itself.
            device: Where they are.
            group: The ranks that take part, more than one.
        """
        assert group is not None
        self._runtime, self._group, self._sizes = runtime, group, list(sizes)
        self._arrived = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self._pieces = self._arrived.split(self._sizes)
        self._rank, self._tag = dist.get_rank(group), _next_tag(group)
        # What is on an accelerator gloo sends in collectives alone.
        self._singly = device.type == "cpu" and group._get_backend(device).name() == "gloo"
        self._posted: list[Posted] = []
        if self._singly:
            self._post(dist.irecv, self._pieces)

    def send(self, sent: Tensor, splits: Sequence[int]) -> None:
        """Begin to send.

        Args:
            sent: What each rank is sent, end to end, in bytes; not to be touched until `wait` returns.
            splits: How many bytes go to each.
        """
        if self._singly:
            pieces = sent.split(list(splits))
            self._pieces[self._rank].copy_(pieces[self._rank])
            self._post(dist.isend, pieces)
            return
        with self._runtime.talking():
            work = dist.all_to_all_single(
                self._arrived, sent, self._sizes, list(splits), group=self._group, async_op=True
            )
        self._posted.append(Posted(self._runtime, work, self._group))

    def wait(self) -> list[Tensor]:
        """Wait until all bytes have come and gone; return those that came from each rank."""
        for posted in self._posted:
            posted.wait()
        return list(self._pieces)

    def _post(self, call: Callable[..., dist.Work | None], pieces: Sequence[Tensor]) -> None:
        with self._runtime.talking():
            for rank, piece in enumerate(pieces):
                if rank != self._rank and len(piece):
                    peer = dist.get_global_rank(self._group, rank)
                    work = call(piece, peer, group=self._group, tag=self._tag)
                    self._posted.append(Posted(self._runtime, work, self._group))


def _next_tag(group: dist.ProcessGroup) -> int:
    """Return another tag each time: what an error has left behind receives nothing that is meant for others."""
    number = _numbers[group] = (_numbers.get(group, -1) + 1) % len(_TAGS)
    return _TAGS[number]
