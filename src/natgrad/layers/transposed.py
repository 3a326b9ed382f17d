"""``nn.ConvTranspose1d``, ``nn.ConvTranspose2d`` and ``nn.ConvTranspose3d``, with every option.

The stride puts zeros between the elements of the input, so that an output position meets only the kernel offsets of one
residue class. Each such *phase* is a convolution of stride 1 with a part of the kernel, and the zeros are never
multiplied: im2col of the input with zeros takes s^(2 dimensions) times the arithmetic at stride s. If kernel and stride
are equal, all phases see the same elements and are computed once. On one core the factor of a 2-D layer of 64 channels
takes 0.07 of the time of im2col with kernel 2 and stride 2, 0.5 with kernel 4 and stride 2, and 1 at stride 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod

import torch
from torch import Tensor, nn
from typing_extensions import override

from natgrad.layers.base import Slot
from natgrad.layers.convolution import ConvolutionLayer, KernelRows, PatchRows
from natgrad.layers.gram.windows import Window
from natgrad.layers.rows import Rows, with_constant

_Slices = tuple[slice, ...]
_ALL = slice(None)
_BOTH = (_ALL, _ALL)


class TransposedConvolutionLayer(ConvolutionLayer):
    """One block per group. Rows are *output* positions, columns those of ``weight.transpose(0, 1)`` of each group."""

    module: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d  # type: ignore[assignment]

    @override
    def lay_out(self) -> None:
        self.blocks = self._count_blocks()
        self.outputs = self.module.out_channels // self.blocks
        self._kernel: tuple[int, ...] = self.module.kernel_size
        self.weight_columns = self.module.in_channels // self.blocks * prod(self._kernel) if self.weight else 0
        self.inputs = self.weight_columns + int(self.bias)
        self._place_slots()

    def align(self, slot: Slot, tensor: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Match the weight ``[n c, o, *kernel]`` with its blocks."""
        if slot.leaf != "weight":
            return super().align(slot, tensor, blocks)
        weight = tensor.unflatten(0, (self.blocks, -1))
        return weight, blocks.unflatten(2, (weight.shape[1], *self._kernel)).transpose(1, 2)

    def _patches(self, maps: Tensor, positions: tuple[int, ...]) -> Rows:
        return PhaseRows(maps, self.module, positions, bias=self.bias)


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """The input elements that a phase meets in one dimension, counted from its end.

    Attributes:
        start: The first input element.
        stop: The last input element + 1.
        padding: Zeros before and after these.
        kernel_size: The number of kernel offsets.
        dilation: The distance between the elements of neighbouring offsets.
    """

    start: int
    stop: int
    padding: tuple[int, int]
    kernel_size: int
    dilation: int


@dataclass(frozen=True)
class _Phase:
    """One dimension of a phase: kernel offsets, output positions and input elements, the last two from the end."""

    offsets: slice
    positions: slice
    seen: _Seen


class PhaseRows(KernelRows):
    """The patches of a transposed convolution on ``maps [B, C, *spatial]``, one per output position."""

    def __init__(
        self,
        maps: Tensor,
        module: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d,
        positions: tuple[int, ...],
        *,
        bias: bool,
    ) -> None:
        """Split the kernel into phases; patches are not built."""
        super().__init__(maps, module.kernel_size, module.groups, bias=bias)
        self.positions = prod(positions)
        self._module, self._spatial = module, positions
        self._patch = (self.channels, *self.kernel_size)
        # Kernel offsets count against the direction of the input, and torch has no views with negative strides.
        flipped = maps.flip(tuple(range(2, maps.ndim)))
        sizes = (maps.shape[2:], positions, module.kernel_size, module.stride, module.padding, module.dilation)
        self._phases: dict[tuple[_Seen, ...], list[tuple[_Slices, _Slices]]] = {}
        for phase in product(*(list(_phases(*lengths)) for lengths in zip(*sizes, strict=True))):
            seen = tuple(axis.seen for axis in phase)
            places = (tuple(axis.offsets for axis in phase), tuple(axis.positions for axis in phase))
            self._phases.setdefault(seen, []).append(places)
        self._rows = [_patches(flipped, seen, module.groups, bias=bias) for seen in self._phases]

    @override
    def of(self, maps: Tensor, *, bias: bool) -> Rows:
        return PhaseRows(maps, self._module, self._spatial, bias=bias)

    def add_gram_(self, out: Tensor, *, scale: float = 1.0, overwrite: bool = False) -> None:
        """Add the Gram matrix. It is zero for pairs of offsets of different phases, which share no position."""
        if overwrite:
            out.zero_()
        width = prod(self._patch)
        square = out[:, :width, :width].unflatten(2, self._patch).unflatten(1, self._patch)
        for rows, phases in zip(self._rows, self._phases.values(), strict=True):
            width = self._patch[0] * prod(rows.window.kernel_size)
            gram = out.new_empty(self.groups, width + self.bias, width + self.bias)
            rows.add_gram_(gram, scale=scale, overwrite=True)
            for offsets, _ in phases:
                target = square[(*_BOTH, *offsets, _ALL, *offsets)]
                target.add_(gram[:, :width, :width].reshape(target.shape))
                if self.bias:
                    row = out[:, -1, :-1].unflatten(1, self._patch)[(*_BOTH, *offsets)]
                    row.add_(gram[:, -1, :-1].reshape(row.shape))
        if self.bias:
            out[:, -1, -1].add_(scale * self.samples * self.positions)

    @override
    def pool(self) -> Tensor:
        dtype = torch.promote_types(self.maps.dtype, torch.float32)
        pooled = self.maps.new_zeros(self.groups, self.samples, *self._patch, dtype=dtype)
        for rows, phases in zip(self._rows, self._phases.values(), strict=True):
            sums = self._patches_only(rows.pool())
            for offsets, _ in phases:
                target = pooled[(*_BOTH, _ALL, *offsets)]
                target.copy_(sums.reshape(target.shape))
        flat = pooled.flatten(2)
        return with_constant(flat, self.positions) if self.bias else flat

    def dense(self) -> Tensor:
        """Return all rows. With a stride above 1 most entries are zero."""
        patches = self.maps.new_zeros(self.groups, self.samples, *self._spatial, *self._patch)
        for rows, phases in zip(self._rows, self._phases.values(), strict=True):
            values = self._patches_only(rows.dense())
            for offsets, positions in phases:
                target = patches[(*_BOTH, *positions, _ALL, *offsets)]
                target.copy_(values.reshape(target.shape))
        ndim = len(self._spatial)
        matrix = patches.flip(tuple(range(2, 2 + ndim))).flatten(2 + ndim).flatten(2, 1 + ndim)
        return with_constant(matrix, 1) if self.bias else matrix

    def _patches_only(self, rows: Tensor) -> Tensor:
        return rows[..., :-1] if self.bias else rows


def _phases(inputs: int, outputs: int, kernel: int, stride: int, padding: int, dilation: int) -> Iterator[_Phase]:
    """Yield the phases of one dimension that have an output position.

    Counted from the end, position t meets at offset κ the input element (t + κ dilation - shift) / stride if that is a
    whole number, which holds for offsets and positions of matching residue classes.
    """
    shift = outputs + padding - (inputs - 1) * stride - 1
    common = gcd(stride, dilation)
    step = stride // common
    for first in range(min(step, kernel)):
        start = (shift - first * dilation) % stride
        count, reach = len(range(start, outputs, stride)), dilation // common * ((kernel - 1 - first) // step)
        before = (shift - first * dilation - start) // stride
        after = count + reach - inputs - before
        met = range(max(0, -before), min(inputs, inputs + after))
        if count and met:
            seen = _Seen(
                start=met.start,
                stop=met.stop,
                padding=(max(0, before), max(0, after)),
                kernel_size=(kernel - 1 - first) // step + 1,
                dilation=dilation // common,
            )
            yield _Phase(slice(first, None, step), slice(start, None, stride), seen)


def _patches(maps: Tensor, seen: Sequence[_Seen], groups: int, *, bias: bool) -> PatchRows:
    window = Window(
        kernel_size=tuple(axis.kernel_size for axis in seen),
        stride=(1,) * len(seen),
        padding=tuple(axis.padding for axis in seen),
        dilation=tuple(axis.dilation for axis in seen),
    )
    return PatchRows(maps[(*_BOTH, *(slice(axis.start, axis.stop) for axis in seen))], window, groups, bias=bias)
