"""Tensors of several groups of blocks processed as one, where calls take the time: on a GPU, and of small tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from natgrad.linalg.device import by_device

T = TypeVar("T")

# Bytes of tensors that are processed together and so are in memory at once.
_HOST, _ACCELERATOR = 2**22, 2**26


def together(
    items: Iterable[T], place: Callable[[T], tuple[torch.device, object]], nbytes: Callable[[T], int] = lambda _: 0
) -> Iterator[list[T]]:
    """Yield items that are processed together: those of one place, up to a bound on their memory.

    Args:
        items: The items, of which no more are drawn than it takes.
        place: Where an item is, and what else is equal for those that may be worked on together.
        nbytes: The bytes that an item holds until its group has been processed.
    """
    groups: dict[object, tuple[int, list[T]]] = {}
    for item in items:
        device, *_ = key = place(item)
        most = by_device(device, host=_HOST, accelerator=_ACCELERATOR)
        own = nbytes(item)
        size, group = groups.get(key, (0, []))
        if group and size + own > most:
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
