"""Make process groups of some of the ranks once, on all ranks together, and keep them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

# The ranks, numbered within the whole group, and the purpose: each purpose has a queue of messages of its own.
Key = tuple[tuple[int, ...], str]
# Whether a rank has the group already, and the least number by which torch may name a new one.
Offer = tuple[bool, int]

_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Key, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
# By world the highest number used so far: the addresses of a destroyed group stay in the store, so no number returns.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def offer(whole: dist.ProcessGroup, key: Key) -> Offer:
    """Return what the other ranks must know before `subgroup` is called."""
    return key in _kept.get(whole, {}), max(_group_count(), _numbers.get(_world(), -1) + 1)


def subgroup(whole: dist.ProcessGroup, key: Key, offers: Sequence[Offer]) -> dist.ProcessGroup:
    """Return a group of some ranks of `whole`: the kept one if all of them have it, else a new one; collective.

    `key` is the group that this rank wants, and `offers` are the results of `offer` on each rank of `whole`.
    """
    known = _kept.setdefault(whole, {})
    ranks, _ = key
    if not all(offers[rank][0] for rank in ranks):
        known[key] = _make([dist.get_global_rank(whole, rank) for rank in ranks], whole, max(n for _, n in offers))
    return known[key]


def forget(group: dist.ProcessGroup | None) -> None:
    """Drop the kept subgroups of `group`, or of the one that it is part of: after an error their queues are stuck."""
    for whole, known in list(_kept.items()):
        if whole is group or group in known.values():
            known.clear()


def subgroup_of_world(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return the group of some ranks of the world, which make it together."""
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
    """Return the timeout of a group; None: the default of its backend.

    Torch gives a new subgroup the backend's default and not the timeout of the whole group.
    """
    options = getattr(group._get_backend(device_of(group)), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def _make(ranks: list[int], like: dist.ProcessGroup, number: int) -> dist.ProcessGroup:
    """Make a group of some ranks of the world.

    Only members take part, so torch names the group by the number of groups that a process is in. Members in different
    numbers of the user's groups would wait under different names: those in fewer first make spare groups.
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
