"""``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``: any stride, padding, dilation and number of groups."""

from __future__ import annotations

from abc import abstractmethod
from itertools import product
from math import prod
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from natgrad.layers import gram
from natgrad.layers.base import Layer
from natgrad.layers.gram.windows import Window
from natgrad.layers.rows import ChannelRows, MatrixRows, Rows, sum_squares, sum_up, with_constant

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


class ConvolutionLayer(Layer):
    """One block per group. Rows are im2col patches, in the order of ``weight.flatten(1)``."""

    module: Convolution

    def _count_blocks(self) -> int:
        self._ndim = len(self.module.kernel_size) + 2
        return self.module.groups

    @override
    def batched(self, inputs: Tensor) -> bool:
        return inputs.ndim == self._ndim

    @override
    def positions(self, gradients: Tensor) -> int:
        return gradients.numel() // self.module.out_channels

    @override
    def input_rows(self, inputs: Tensor, gradients: Tensor, samples: int) -> Rows:
        if not self.weight:
            ones = MatrixRows(inputs.new_empty(self.positions(gradients), 0), samples, bias=True)
            return ones if self.blocks == 1 else _Repeated(ones, self.blocks)
        batched = self.batched(inputs)
        maps, seen = (tensor if batched else tensor[None] for tensor in (inputs, gradients))
        return self._patches(maps, tuple(seen.shape[2:]))

    def _patches(self, maps: Tensor, positions: tuple[int, ...]) -> Rows:
        """Return the patches of ``maps [B, C, *spatial]`` with these numbers of output `positions` per dimension."""
        padding = _padding(self.module)
        if self.module.padding_mode != "zeros":
            maps = F.pad(maps, _flat(padding), mode=self.module.padding_mode)
            padding = ((0, 0),) * len(padding)
        window = Window(
            kernel_size=self.module.kernel_size,
            stride=self.module.stride,
            padding=padding,
            dilation=self.module.dilation,
        )
        return PatchRows(maps, window, self.module.groups, bias=self.bias)

    @override
    def gradient_rows(self, gradients: Tensor, samples: int) -> Rows:
        return ChannelRows(gradients if self.batched(gradients) else gradients[None], self.blocks)


class KernelRows(Rows):
    """Rows with a column for each element of a kernel, of each channel of ``maps [B, C, *spatial]`` in n groups."""

    def __init__(self, maps: Tensor, kernel_size: tuple[int, ...], groups: int, *, bias: bool) -> None:
        """Wrap `maps`."""
        self.maps, self.groups, self.bias = maps, groups, bias
        self.samples, self.channels = maps.shape[0], maps.shape[1] // groups
        self.kernel_size = kernel_size

    @abstractmethod
    def of(self, maps: Tensor, *, bias: bool) -> Rows:
        """Return the rows of the same kernel for other `maps` of the same sizes."""

    @override
    def part(self, start: int, stop: int) -> Rows:
        return self.of(self.maps[start:stop], bias=self.bias)

    def squares(self) -> Tensor:
        """Return the sums of squares: box sums of the squared maps."""
        squares = self.of(sum_squares(self.maps, 0)[None], bias=False).pool()[:, 0]
        return with_constant(squares, self.samples * self.positions) if self.bias else squares


class PatchRows(KernelRows):
    """The patches of a convolution on ``maps [B, C, *spatial]`` with n groups of channels."""

    def __init__(self, maps: Tensor, window: Window, groups: int, *, bias: bool) -> None:
        """Wrap `maps`; patches are not built."""
        super().__init__(maps, window.kernel_size, groups, bias=bias)
        self.window = window
        self._spatial = window.positions(tuple(maps.shape[2:]))
        self.positions = prod(self._spatial)

    @override
    def of(self, maps: Tensor, *, bias: bool) -> Rows:
        return PatchRows(maps, self.window, self.groups, bias=bias)

    @override
    def add_gram_(self, out: Tensor, *, scale: float = 1.0, overwrite: bool = False) -> None:
        gram.add_patch_gram_(
            out,
            self.maps,
            kernel_size=self.window.kernel_size,
            stride=self.window.stride,
            padding=self.window.padding,
            dilation=self.window.dilation,
            groups=self.groups,
            bias=self.bias,
            scale=scale,
            overwrite=overwrite,
        )

    def pool(self) -> Tensor:
        """Return the sums over positions: a box sum for each kernel offset, without building patches."""
        spatial = tuple(range(2, self.maps.ndim))
        sums = torch.stack([sum_up(view, spatial) for view in self._offsets()], -1)  # [B, C, kernel]
        pooled = sums.unflatten(1, (self.groups, -1)).flatten(2).transpose(0, 1)
        return with_constant(pooled, self.positions) if self.bias else pooled

    def dense(self) -> Tensor:
        """Return all patches (im2col)."""
        patches = torch.stack([view.flatten(2) for view in self._offsets()], 2)  # [B, C, kernel, T]
        rows = patches.unflatten(1, (self.groups, -1)).flatten(2, 3).permute(1, 0, 3, 2)
        return with_constant(rows, 1) if self.bias else rows

    def outer(self, gradients: Tensor) -> Tensor:
        """Return the outer products, computing the column of the constant 1 separately."""
        patches = torch.stack([view.flatten(2) for view in self._offsets()], 2).to(gradients.dtype)
        by_group = patches.unflatten(1, (self.groups, -1)).flatten(2, 3)  # [B, n, i, T]
        products = (gradients.transpose(0, 1).mT @ by_group.mT).transpose(0, 1)
        return torch.cat([products, sum_up(gradients, 2)[..., None]], -1) if self.bias else products

    def _offsets(self) -> list[Tensor]:
        """Return the values at all positions ``[B, C, *positions]`` for each offset of the kernel."""
        window = self.window
        padded = F.pad(self.maps, _flat(window.padding))
        views = []
        for offset in product(*map(range, window.kernel_size)):
            view = padded
            for axis, (place, stride, dilation, length) in enumerate(
                zip(offset, window.stride, window.dilation, self._spatial, strict=True), start=2
            ):
                first = place * dilation
                view = view[(slice(None),) * axis + (slice(first, first + (length - 1) * stride + 1, stride),)]
            views.append(view)
        return views


class _Repeated(Rows):
    """The same rows in every block: the constant of a grouped convolution with a frozen weight."""

    def __init__(self, rows: Rows, blocks: int) -> None:
        self.rows, self.blocks = rows, blocks
        self.samples, self.positions = rows.samples, rows.positions

    def add_gram_(self, out: Tensor, *, scale: float = 1.0, overwrite: bool = False) -> None:
        first = out.new_empty(1, *out.shape[1:])
        self.rows.add_gram_(first, scale=scale, overwrite=True)
        out.copy_(first.expand_as(out)) if overwrite else out.add_(first)

    def pool(self) -> Tensor:
        return self.rows.pool().expand(self.blocks, -1, -1)

    def dense(self) -> Tensor:
        return self.rows.dense().expand(self.blocks, -1, -1, -1)


def _padding(module: Convolution) -> tuple[tuple[int, int], ...]:
    if module.padding == "valid":
        return ((0, 0),) * len(module.kernel_size)
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((cast("int", padding),) * 2 for padding in module.padding)


def _flat(padding: tuple[tuple[int, int], ...]) -> list[int]:
    """Return `padding` in the order of `F.pad`: the last dimension first."""
    return [side for sides in reversed(padding) for side in sides]
