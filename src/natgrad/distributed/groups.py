"""Make process groups of some ranks, collectively on all ranks, and cache them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

# The ranks within the whole group, and the purpose: each purpose has a separate queue of messages.
Key = tuple[tuple[int, ...], str]
# Whether a rank has the group in its cache, and the smallest free number for a new one.
Offer = tuple[bool, int]

_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Key, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
# By world, the highest number used so far. Addresses of destroyed groups stay in the store, so numbers are not reused.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def offer(whole: dist.ProcessGroup, key: Key) -> Offer:
    """Return the offer of this rank, which `subgroup` needs from all ranks."""
    return key in _kept.get(whole, {}), max(_group_count(), _numbers.get(_world(), -1) + 1)


def subgroup(whole: dist.ProcessGroup, key: Key, offers: Sequence[Offer]) -> dist.ProcessGroup:
    """Return the group `key` of ranks of `whole`: the cached one if all its ranks have it, otherwise a new one.

    Collective; `offers` are the results of `offer` on each rank of `whole`.
    """
    known = _kept.setdefault(whole, {})
    ranks, _ = key
    if not all(offers[rank][0] for rank in ranks):
        known[key] = _make([dist.get_global_rank(whole, rank) for rank in ranks], whole, max(n for _, n in offers))
    return known[key]


def forget(group: dist.ProcessGroup | None) -> None:
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


def _make(ranks: list[int], like: dist.ProcessGroup, number: int) -> dist.ProcessGroup:
    """Make a group of some ranks of the world; collective over these ranks.

    Torch then names the group by the number of groups that a process is in. Ranks that are in fewer groups first make
    spare ones, so that all use the same name.
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
