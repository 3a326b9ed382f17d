"""Groups of some of the ranks: made once, lent to who needs them, and kept for the next when they come back.

A rank cannot end a group when it likes. The others delete their objects at other times, and NCCL may wait for them; and
torch names a group by its members and by the number of groups a process is in, so that a later one may have the name of
one that is gone, and its ranks would meet at old addresses. So what comes back is kept for as long as the ranks'
own group lives, and lent again once all that was posted in it is done, on all of its ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

Members = tuple[int, ...]
# The names of groups that a rank has to lend, and the least number that it can make a new name of.
Offer = tuple[list[str], int]


@dataclass(frozen=True)
class _Kept:
    """A group that has come back.

    Attributes:
        members: Its ranks.
        group: The group.
        posted: What nobody has waited for.
    """

    members: Members
    group: dist.ProcessGroup
    posted: list[dist.Work]

    @property
    def silent(self) -> bool:
        """Whether nothing is under way in it."""
        return all(work.is_completed() for work in self.posted)


_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, list[_Kept]] = weakref.WeakKeyDictionary()
# By the world the highest number that the name of a group was made of.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_shared: weakref.WeakValueDictionary[Members, dist.ProcessGroup] = weakref.WeakValueDictionary()


class Groups:
    """What one user has been lent of the groups within a group; it comes back when the user is deleted."""

    def __init__(self, whole: dist.ProcessGroup | None) -> None:
        """Begin with none.

        Args:
            whole: All ranks; None: this process alone.
        """
        self.whole = whole
        self._lent: list[tuple[Members, dist.ProcessGroup]] = []
        self._posted: dict[dist.Work, dist.ProcessGroup] = {}
        if whole is not None:
            weakref.finalize(self, _take_back, whole, self._lent, self._posted).atexit = False

    def offer(self, members: Sequence[int]) -> Offer:
        """Return what the other ranks have to know before `borrow`."""
        assert self.whole is not None
        free = [_name(one.group) for one in _kept.get(self.whole, ()) if one.members == tuple(members) and one.silent]
        return free, max(_known(), _numbers.get(_world(), -1) + 1)

    def borrow(self, members: Sequence[int], offers: Sequence[Offer]) -> dist.ProcessGroup:
        """Return a group that nobody else uses; all ranks call it together, each for its own group.

        Args:
            members: The ranks, this one among them, in rising order.
            offers: What `offer` has returned on each rank.
        """
        assert self.whole is not None
        kept = _kept.setdefault(self.whole, [])
        shared = set.intersection(*(set(offers[rank][0]) for rank in members))
        if shared:
            one = next(one for one in kept if _name(one.group) == min(shared))
            kept.remove(one)
            group = one.group
        else:
            ranks = [dist.get_global_rank(self.whole, rank) for rank in members]
            group = _make(ranks, self.whole, max(number for _, number in offers))
        self._lent.append((tuple(members), group))
        return group

    def posted(self, work: dist.Work, group: dist.ProcessGroup | None) -> None:
        """Note that a message is under way in a group."""
        if group is not None and group is not self.whole:
            self._posted[work] = group

    def done(self, work: dist.Work) -> None:
        """Note that it was waited for."""
        self._posted.pop(work, None)

    def give_back(self) -> None:
        """Give back what nothing is under way in; the rest follows when this object is deleted."""
        busy = set(self._posted.values())
        silent = [one for one in self._lent if one[1] not in busy]
        if self.whole is not None:
            _take_back(self.whole, silent, {})
        self._lent[:] = [one for one in self._lent if one[1] in busy]

    def forget(self) -> None:
        """Give nothing back: after an error nobody knows what is in the queues."""
        self._lent.clear()


def of_world(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return the group of some ranks of the world, made by them together, and the same one for all who ask."""
    key = tuple(ranks)
    group = _shared.get(key)
    if group is None or group not in dist.distributed_c10d._world.pg_map:  # of a world that is gone
        made = dist.new_group(list(ranks), use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        group = _shared[key] = made
    return group


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return where a group takes small messages from."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return how long a group waits; None: as long as its backend does by default.

    A new group has the default, and not what its user has asked for, unless it is told.
    """
    options = getattr(group._get_backend(device_of(group)), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def _take_back(
    whole: dist.ProcessGroup, lent: list[tuple[Members, dist.ProcessGroup]], posted: dict[dist.Work, dist.ProcessGroup]
) -> None:
    kept = _kept.setdefault(whole, [])
    for members, group in lent:
        kept.append(_Kept(members, group, [work for work, own in posted.items() if own is group]))


def _make(ranks: list[int], like: dist.ProcessGroup, number: int) -> dist.ProcessGroup:
    """Make a group of some ranks of the world, under a name of the same `number` on each of them."""
    backend, timeout = dist.get_backend(like), timeout_of(like)
    # Torch names a group that its members alone make by how many groups a process is in. Ranks that are in different
    # ones, of the user's, would wait for each other under different names: those in fewer fill up.
    spare = [
        dist.new_group([dist.get_rank()], backend=backend, timeout=timeout, use_local_synchronization=True)
        for _ in range(number - _known())
    ]
    made = dist.new_group(ranks, backend=backend, timeout=timeout, use_local_synchronization=True)
    for group in spare:
        dist.destroy_process_group(group)
    _numbers[_world()] = number
    assert isinstance(made, dist.ProcessGroup)
    return made


def _known() -> int:
    """Return how many groups this process is in."""
    return len(dist.distributed_c10d._world.pg_names)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _name(group: dist.ProcessGroup) -> str:
    """Return torch's name of a group, the same on all of its ranks."""
    return str(group.group_name)
