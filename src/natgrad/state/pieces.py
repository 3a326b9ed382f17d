"""The number of blocks that are preconditioned at once."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.linalg.device import by_device

# Bytes of a tensor of the blocks that are worked on at once. A GPU is fastest with few calls; a CPU with tensors that
# fit its caches and the memory that activations have freed.
_CPU, _OTHER = 2**21, 2**26


def even_pieces(count: int, size: int, device: torch.device) -> list[slice]:
    """Cut `count` blocks of `size` bytes each into pieces; into none where equal ones would be too large or small.

    A remainder would be another kind of product, which oneDNN keeps in half a MiB.
    """
    most = by_device(device, host=_CPU, accelerator=_OTHER)
    sizes = [step for step in range(1, count + 1) if count % step == 0 and most / 4 <= step * size <= most]
    step = max(sizes, default=1 if size > most else max(1, count))
    return [slice(start, start + step) for start in range(0, count, step)]


def within(blocks: slice | Tensor, piece: slice) -> slice | Tensor:
    """Return a piece of some blocks, which are given as a slice with a step of 1 or as indices."""
    if isinstance(blocks, Tensor):
        return blocks[piece]
    first = blocks.start or 0
    return slice(first + piece.start, first + piece.stop)
