"""``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``: any stride, padding, dilation and number of groups."""

from __future__ import annotations

from collections.abc import Sequence
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
from natgrad.layers.rows import ChannelRows, DenseRows, Rows, sum_squares, sum_up, with_constant

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


class ConvolutionLayer(Layer):
    """One block per group. Rows are im2col patches, in the order of ``weight.flatten(1)``."""

    module: Convolution

    @property
    @override
    def offsets(self) -> int:
        return prod(self.module.kernel_size)

    @override
    def block_sizes(self, weight: Tensor) -> tuple[int, int, int]:
        groups = self.module.groups
        return groups, len(weight) // groups, weight.shape[1:].numel()

    @override
    def batched(self, inputs: Tensor) -> bool:
        return inputs.ndim == len(self.module.kernel_size) + 2

    @override
    def positions(self, gradients: Tensor) -> int:
        return gradients.numel() // self.module.out_channels

    @override
    def input_rows(self, inputs: Tensor, gradients: Tensor, samples: int) -> Rows:
        if not self.weight:
            positions = self.positions(gradients) // samples
            return DenseRows(inputs.new_ones(()).expand(self.blocks, samples, positions, 1))
        batched = self.batched(inputs)
        maps, seen = (tensor if batched else tensor[None] for tensor in (inputs, gradients))
        return self._patches(maps, tuple(seen.shape[2:]))

    def _patches(self, maps: Tensor, positions: tuple[int, ...]) -> Rows:
        """Return the patches of ``maps [B, C, *spatial]`` with these numbers of output `positions` per dimension."""
        padding = _padding(self.module)
        if self.module.padding_mode != "zeros":
            maps = F.pad(maps, flat_padding(padding), mode=self.module.padding_mode)
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


class PatchRows(Rows):
    """The patches of a convolution on ``maps [B, C, *spatial]`` with n groups of channels."""

    def __init__(self, maps: Tensor, window: Window, groups: int, *, bias: bool) -> None:
        self.maps, self.window, self.groups, self.bias = maps, window, groups, bias
        self._spatial = window.positions(tuple(maps.shape[2:]))
        self.samples, self.positions = maps.shape[0], prod(self._spatial)

    @override
    def add_gram_(self, out: Tensor, *, scale: float = 1.0) -> None:
        gram.add_patch_gram_(out, self.maps, self.window, bias=self.bias, scale=scale)

    @override
    def add_channel_gram_(self, out: Tensor, *, scale: float = 1.0) -> None:
        maps = self.maps.to(out.dtype)
        gram.add_channel_gram_(out, maps * self.window.count_visits(maps).sqrt(), scale=scale)

    @override
    def part(self, start: int, stop: int) -> Rows:
        return PatchRows(self.maps[start:stop], self.window, self.groups, bias=self.bias)

    def squares(self) -> Tensor:
        """Return the sums of squares: box sums of the squared maps."""
        squares = PatchRows(sum_squares(self.maps, 0)[None], self.window, self.groups, bias=False).pool()[:, 0]
        return with_constant(squares, self.samples * self.positions) if self.bias else squares

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
        padded = F.pad(self.maps, flat_padding(window.padding))
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


def _padding(module: Convolution) -> tuple[tuple[int, int], ...]:
    if module.padding == "valid":
        return ((0, 0),) * len(module.kernel_size)
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((cast("int", padding),) * 2 for padding in module.padding)


def flat_padding(padding: Sequence[tuple[int, int]]) -> list[int]:
    """Return `padding` in the order of `F.pad`: the last dimension first."""
    return [side for sides in reversed(padding) for side in sides]
