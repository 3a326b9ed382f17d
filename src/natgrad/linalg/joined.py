"""Joining tensors of several groups of blocks, to process small tensors in fewer calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from natgrad.linalg.device import by_device

T = TypeVar("T")

# The largest number of bytes of tensors that are processed together.
_HOST, _ACCELERATOR = 2**22, 2**26


def together(
    items: Iterable[T], place: Callable[[T], tuple[torch.device, object]], nbytes: Callable[[T], int] = lambda _: 0
) -> Iterator[list[T]]:
    """Yield lists of items to process together: those with the same `place`, up to a bound on their memory.

    Args:
        items: The items, read lazily.
        place: Returns an item's device and a key; items are processed together if both are equal.
        nbytes: Returns the bytes that an item holds until its list has been processed.
    """
    groups: dict[object, tuple[int, list[T]]] = {}
    for item in items:
        device, *_ = key = place(item)
        most = by_device(device, host=_HOST, accelerator=_ACCELERATOR)
        added = nbytes(item)
        size, group = groups.get(key, (0, []))
        if group and size + added > most:
            yield group
            size, group = 0, []
        groups[key] = size + added, [*group, item]
    while groups:  # each list is released after it was processed
        yield groups.pop(next(iter(groups)))[1]


def joined(vectors: Sequence[Tensor]) -> Tensor:
    """Return the concatenated vectors; a single vector is not copied."""
    return vectors[0] if len(vectors) == 1 else torch.cat(list(vectors))


def parted(joint: Tensor, vectors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `joint` with the lengths of `vectors`."""
    return [joint] if len(vectors) == 1 else list(joint.split([len(vector) for vector in vectors]))


def write_(targets: Sequence[tuple[Tensor, slice | Tensor]], joint: Tensor) -> None:
    """Write the consecutive parts of one vector into entries of others.

    Args:
        targets: The other vectors, and the entries to write: a slice, or indices.
        joint: The vector of values.
    """
    places = [target[entries] if isinstance(entries, slice) else entries for target, entries in targets]
    direct, values = [], []
    for (target, entries), place, part in zip(targets, places, parted(joint, places), strict=True):
        if isinstance(entries, slice):
            direct.append(place)
            values.append(part)
        else:
            target[entries] = part
    if direct:
        torch._foreach_copy_(direct, values)
