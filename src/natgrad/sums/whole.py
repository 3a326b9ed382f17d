"""Memory for whole sums, before they are packed: of one layer, or of all layers of a stack, to be packed as one."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor

from natgrad.lapack import collide
from natgrad.specs import Statistic
from natgrad.stacks.blocks import Stack

# The most elements of matrices that are left whole for a step, and of all that are.
_SMALL, _ALL = 2**19, 2**26
_ALIGNED = 128  # elements
_WIDE, _STEP = 128, 16  # columns from which on `alone` sets rows apart, and what their distance is a multiple of


class Whole:
    """Whole sums of the layers of stacks, side by side, of those stacks where that takes little memory."""

    def __init__(self, stacks: Sequence[Stack]) -> None:
        """Take no memory yet."""
        self._small: set[int] = set()
        self._kept: dict[tuple[int, str], Tensor] = {}
        total = 0
        for stack in stacks:
            sizes = [spec.numel for spec in stack.statistics]
            own = stack.size * sum(sizes)
            if max(sizes, default=0) <= _SMALL and total + own <= _ALL:
                self._small.add(id(stack))
                total += own

    def __bool__(self) -> bool:
        """Tell whether there are any."""
        return bool(self._kept)

    def takes(self, stack: Stack) -> bool:
        """Tell whether the layers of a stack are to have theirs here: where it is calls that take the time."""
        return id(stack) in self._small and stack.device.type != "cpu"

    def of(self, stack: Stack, spec: Statistic, blocks: slice) -> Tensor:
        """Return the sums of some blocks ``[n, *shape]``, uninitialised before they are first written."""
        key = id(stack), spec.name
        if key not in self._kept:
            # Each begins where it would in memory of its own: products round by how they are aligned.
            apart = ceil(spec.numel / _ALIGNED) * _ALIGNED
            own = torch.empty(stack.size, apart, dtype=stack.dtype, device=stack.device)[:, : spec.numel]
            self._kept[key] = own.view(-1, *spec.shape)
        return self._kept[key][blocks]

    def drop(self, stack: Stack) -> None:
        """Drop all of a stack."""
        for spec in stack.statistics:
            self._kept.pop((id(stack), spec.name), None)

    def clear(self) -> None:
        """Drop all there is."""
        self._kept.clear()


def alone(like: Tensor, blocks: int, spec: Statistic) -> Tensor:
    """Return uninitialised memory ``[blocks, *shape]`` for the whole sums of one layer.

    Rows of wide matrices begin as far apart in those of 256 columns as in those of 257, so that products write both in
    the same way (`natgrad.gram.rows`), and so that columns do not `collide` in caches.
    """
    columns = spec.shape[-1] if spec.symmetric and like.device.type == "cpu" else 0
    if columns < _WIDE:
        return like.new_empty(blocks, *spec.shape)
    apart = _STEP * (columns // _STEP + 1)
    apart += _STEP if collide(apart, like.dtype) else 0
    return like.new_empty(blocks, *spec.shape[:-1], apart)[..., :columns]
