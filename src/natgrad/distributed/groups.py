"""Process groups of some of the ranks: made by them together, once, and kept as long as the group of all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

# Its ranks within the whole group, and what it is for: messages of one purpose do not wait for those of another.
Key = tuple[tuple[int, ...], str]
# Whether a rank has a group already, and the least number that torch may name a new one by.
Offer = tuple[bool, int]

_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Key, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
# By the world the highest number that a group was named by: one that is gone has left its addresses behind.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def offer(whole: dist.ProcessGroup, key: Key) -> Offer:
    """Return what the other ranks have to know before `subgroup`."""
    return key in _kept.get(whole, {}), max(_group_count(), _numbers.get(_world(), -1) + 1)


def subgroup(whole: dist.ProcessGroup, key: Key, offers: Sequence[Offer]) -> dist.ProcessGroup:
    """Return a group of some ranks of `whole`, a new one unless all of them have it; collective.

    Args:
        whole: The group of all ranks.
        key: Which group this rank wants, and is in.
        offers: What `offer` has returned on each rank of `whole`, each for the group that it wants.
    """
    known = _kept.setdefault(whole, {})
    ranks, _ = key
    if not all(offers[rank][0] for rank in ranks):
        known[key] = _make([dist.get_global_rank(whole, rank) for rank in ranks], whole, max(n for _, n in offers))
    return known[key]


def forget(group: dist.ProcessGroup | None) -> None:
    """Use no group that is a part of one, or beside it, again: after an error queues hold what nobody receives."""
    for whole, known in list(_kept.items()):
        if whole is group or group in known.values():
            known.clear()


def subgroup_of_world(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return the group of some ranks of the world, made by them together."""
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
    """Return how long a group waits; None: as long as its backend does by default.

    Torch gives a new group the backend's default instead of the timeout of the group that it is a part of.
    """
    options = getattr(group._get_backend(device_of(group)), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def _make(ranks: list[int], like: dist.ProcessGroup, number: int) -> dist.ProcessGroup:
    """Make a group of some ranks of the world.

    Torch names a group that its members alone make by how many groups a process is in. Ranks that are in different
    numbers of the user's groups would wait for each other under different names: those in fewer make spare ones.
    """
    backend, timeout = dist.get_backend(like), timeout_of(like)
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
