"""``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``: any stride, padding, dilation and number of groups."""

from __future__ import annotations

from itertools import product
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from natgrad import gram
from natgrad.layers.base import Layer
from natgrad.layers.rows import ChannelRows, MatrixRows, Rows, sum_up, with_constant

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


class ConvolutionLayer(Layer):
    """A block a group; rows are im2col patches, in the order of ``weight.flatten(1)``."""

    module: Convolution

    def _count_blocks(self) -> int:
        self._ndim = len(self.module.kernel_size) + 2
        return self.module.groups

    def batched(self, inputs: Tensor) -> bool:
        """See `Layer.batched`."""
        return inputs.ndim == self._ndim

    def positions(self, gradients: Tensor) -> int:
        """See `Layer.positions`."""
        return gradients.numel() // self.module.out_channels

    def input_rows(self, inputs: Tensor, gradients: Tensor, samples: int) -> Rows:
        """See `Layer.input_rows`."""
        if not self.weight:
            ones = MatrixRows(inputs.new_empty(self.positions(gradients), 0), samples, bias=True)
            return ones if self.blocks == 1 else _Repeated(ones, self.blocks)
        return PatchRows(inputs if self.batched(inputs) else inputs[None], self.module, bias=self.bias)

    def gradient_rows(self, gradients: Tensor, samples: int) -> Rows:
        """See `Layer.gradient_rows`."""
        return ChannelRows(gradients if self.batched(gradients) else gradients[None], self.blocks)


class PatchRows(Rows):
    """The patches of a convolution's input ``maps [B, C, *spatial]``."""

    def __init__(self, maps: Tensor, module: Convolution, *, bias: bool) -> None:
        """Apply the padding that is no plain zero padding; the patches stay implicit."""
        self.bias, self.groups = bias, module.groups
        self.kernel: tuple[int, ...] = module.kernel_size
        self.stride: tuple[int, ...] = module.stride
        self.dilation: tuple[int, ...] = module.dilation
        self.padding = _padding(module)
        if module.padding_mode != "zeros":
            maps = F.pad(maps, _flat(self.padding), mode=module.padding_mode)
            self.padding = [(0, 0)] * len(self.padding)
        self.maps, self.samples = maps, maps.shape[0]
        self._spatial = [
            (size + sum(padding) - dilation * (kernel - 1) - 1) // stride + 1
            for size, padding, dilation, kernel, stride in zip(
                maps.shape[2:], self.padding, self.dilation, self.kernel, self.stride, strict=True
            )
        ]
        self.positions = torch.Size(self._spatial).numel()

    def add_gram_(self, out: Tensor, *, scale: float = 1.0, overwrite: bool = False) -> None:
        """See `Rows.add_gram_`."""
        gram.add_patch_gram_(
            out,
            self.maps,
            kernel_size=self.kernel,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            bias=self.bias,
            scale=scale,
            overwrite=overwrite,
        )

    def pool(self) -> Tensor:
        """See `Rows.pool`: a box sum for each offset of the kernel, no patch is built."""
        spatial = tuple(range(2, self.maps.ndim))
        sums = torch.stack([sum_up(view, spatial) for view in self._offsets()], -1)  # [B, C, kernel]
        pooled = sums.unflatten(1, (self.groups, -1)).flatten(2).transpose(0, 1)
        return with_constant(pooled, self.positions) if self.bias else pooled

    def dense(self) -> Tensor:
        """See `Rows.dense`: im2col, for those who need each row."""
        patches = torch.stack([view.flatten(2) for view in self._offsets()], 2)  # [B, C, kernel, T]
        rows = patches.unflatten(1, (self.groups, -1)).flatten(2, 3).permute(1, 0, 3, 2)
        return with_constant(rows, 1) if self.bias else rows

    def _offsets(self) -> list[Tensor]:
        """Return, for each offset of the kernel, what it sees at all positions ``[B, C, *positions]``."""
        padded = F.pad(self.maps, _flat(self.padding))
        views = []
        for offset in product(*map(range, self.kernel)):
            view = padded
            for axis, (place, stride, dilation, length) in enumerate(
                zip(offset, self.stride, self.dilation, self._spatial, strict=True), start=2
            ):
                first = place * dilation
                view = view[(slice(None),) * axis + (slice(first, first + (length - 1) * stride + 1, stride),)]
            views.append(view)
        return views


class _Repeated(Rows):
    """The same rows in every block: the homogeneous coordinate of a grouped convolution whose weight is frozen."""

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


def _padding(module: Convolution) -> list[tuple[int, int]]:
    if module.padding == "valid":
        return [(0, 0)] * len(module.kernel_size)
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(cast("int", padding),) * 2 for padding in module.padding]


def _flat(padding: list[tuple[int, int]]) -> list[int]:
    """Return `padding` in the order of `F.pad`: the last dimension first."""
    return [side for sides in reversed(padding) for side in sides]
