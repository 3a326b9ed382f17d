"""Tensors of several stacks worked on as one, where it is calls that take the time: on a GPU, not on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from natgrad.linalg.device import on_host

T = TypeVar("T")

_TOGETHER = 2**26  # bytes of what is worked on together that are held at once


def together(
    items: Iterable[T], place: Callable[[T], tuple[torch.device, object]], nbytes: Callable[[T], int] = lambda _: 0
) -> Iterator[list[T]]:
    """Yield items of one place together; on a CPU, one by one as they come.

    Args:
        items: The items, of which no more are drawn than it takes.
        place: Where an item is, and what else is equal for those that may be worked on together.
        nbytes: What an item holds until its group was dealt with: no group holds more than `_TOGETHER`, or one item.
    """
    groups: dict[object, tuple[int, list[T]]] = {}
    for item in items:
        device, *_ = key = place(item)
        if on_host(device):
            yield [item]
            continue
        own = nbytes(item)
        size, group = groups.get(key, (0, []))
        if group and size + own > _TOGETHER:
            yield group
            size, group = 0, []
        groups[key] = size + own, [*group, item]
    while groups:  # none is held any more when it was dealt with
        yield groups.pop(next(iter(groups)))[1]


def joined(vectors: Sequence[Tensor]) -> Tensor:
    """Return vectors as one, a single one as it is."""
    return vectors[0] if len(vectors) == 1 else torch.cat(list(vectors))


def parted(joint: Tensor, vectors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of one vector, of the lengths that others have."""
    return [joint] if len(vectors) == 1 else list(joint.split([len(own) for own in vectors]))


def write_(targets: Sequence[tuple[Tensor, slice | Tensor]], joint: Tensor) -> None:
    """Write one vector into parts of others, end to end.

    Args:
        targets: The others, and which of their entries: a slice, or indices.
        joint: What to write.
    """
    places = [target[entries] if isinstance(entries, slice) else entries for target, entries in targets]
    direct, values = [], []
    for (target, entries), place, own in zip(targets, places, parted(joint, places), strict=True):
        if isinstance(entries, slice):
            direct.append(place)
            values.append(own)
        else:
            target[entries] = own
    if direct:
        torch._foreach_copy_(direct, values)
