"""Batches of samples: tensors, and tuples, dictionaries and lists of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

Batch: TypeAlias = Any
"""A tensor with samples first; a tuple or dictionary of batches of the same samples; or a list with one entry a sample.

A list is for samples of different sizes, such as pictures with their boxes.
"""


def to(batch: Batch, device: torch.device | str) -> Batch:
    """Return a batch with all tensors on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: to(part, device) for name, part in batch.items()}
    return type(batch)(to(part, device) for part in batch) if isinstance(batch, tuple | list) else batch


def size(batch: Batch) -> int:
    """Return the number of samples."""
    if isinstance(batch, tuple):
        return size(batch[0])
    return size(next(iter(batch.values()))) if isinstance(batch, Mapping) else len(batch)


def split(batch: Batch, count: int) -> list[Batch]:
    """Return `count` batches of nearly equal numbers of samples."""
    if isinstance(batch, Tensor):
        return list(batch.tensor_split(count))
    if isinstance(batch, Mapping):
        columns = [split(part, count) for part in batch.values()]
        return [dict(zip(batch, parts, strict=True)) for parts in zip(*columns, strict=True)]
    if isinstance(batch, tuple):
        return list(zip(*(split(part, count) for part in batch), strict=True))
    return [[batch[index] for index in part] for part in split(torch.arange(len(batch)), count)]


def tensors(batch: Batch) -> Iterator[Tensor]:
    """Return all tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors(part)
