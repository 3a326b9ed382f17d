"""Patch covariance of a stride-1 convolution by lags, without patches.

If the kernel could overhang the maps everywhere, so that every element met every kernel offset, the sum of products for
offsets p and q would depend only on their *lag* q - p: A[p, q] = R[q - p], R[λ] = Σ_u x[u] x[u + λ]ᵀ. That is 2k - 1
lags per dimension (half of them by symmetry) instead of k² pairs, and R is the weight gradient of a convolution of the
maps with themselves, which is nearly as fast as a matrix product. The contribution of the overhanging positions is then
subtracted: it is a covariance of slices at the border, computed from lags with one dimension less. On one core this
takes 0.07, 0.10 and 0.15 of the time of unfolding and multiplying in the three stages of a CIFAR ResNet
(`benchmarks/gram.py`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn import grad as gradients

from natgrad.layers.gram.rows import add_column_grams_
from natgrad.layers.gram.windows import Window, pieces

_T = TypeVar("_T")

_WEIGHT_GRADIENTS = {1: gradients.conv1d_weight, 2: gradients.conv2d_weight, 3: gradients.conv3d_weight}
_POSITIONS = 1 << 13
"""Positions summed in one convolution. Its float32 error grows with them: 5e-7 at this number, 2e-6 at 2^16."""


def add_lag_gram_(out: Tensor, maps: Tensor, window: Window, groups: int, *, scale: float, piece: int) -> None:
    """Add ``scale`` times the patch covariance of a stride-1 convolution to the lower triangles of ``out [n, i, i]``.

    ``maps [B, C, *spatial]`` are not empty and have the dtype of ``out``. ``piece`` elements are copied at a time.
    """
    kernel, channels, ndim = window.kernel_size, maps.shape[1] // groups, len(window.kernel_size)
    if not ndim:
        columns = maps.view(len(maps), groups, channels).permute(1, 2, 0)
        add_column_grams_(out, [columns], scale=scale)
        return
    _spread_lags(out, lag_sums(maps, window, groups).mul_(scale), kernel, piece=piece)
    blocks = out.view(groups, channels, *kernel, channels, *kernel)
    for border in overhangs(maps, window):
        # Each end of the maps, and the kernel offsets that meet it, is a group of channels.
        lines = torch.cat([line.movedim(2 + border.dim, 2).flatten(1, 2) for line in border.lines], 1)
        ends, width = len(border.covered), channels * border.thickness * math.prod(border.window.kernel_size)
        beyond = out.new_zeros(ends * groups, width, width)
        add_lag_gram_(beyond, lines, border.window, ends * groups, scale=-scale, piece=piece)
        if border.dim and border.thickness > 1:  # the order of offsets differs, so its upper triangle is needed too
            beyond.tril_().add_(beyond.tril(-1).mT)
        half = (channels, border.thickness, *border.window.kernel_size)
        for covered, part in zip(border.covered, beyond.view(ends, groups, *half, *half), strict=True):
            rows = blocks.narrow(2 + border.dim, covered, border.thickness)
            target = rows.narrow(3 + ndim + border.dim, covered, border.thickness)
            target.movedim((2 + border.dim, 3 + ndim + border.dim), (2, 3 + ndim)).add_(part)


def lag_sums(maps: Tensor, window: Window, groups: int) -> Tensor:
    """Sum the products of all elements of ``maps [B, C, *spatial]`` that are a lag apart.

    Returns:
        ``[n, c, c', 2k - 1 for each dimension]``, c = C/n: Σ x_c[u] x_c'[u + dilation · λ], λ counted from 1 - k. Cost:
        C c Π(2k - 1) k₀/(2k₀ - 1) multiply-adds an element of a map, k₀ the first dimension's kernel size.
    """
    first, *others = window.kernel_size
    channels, ndim = maps.shape[1], len(window.kernel_size)
    per_group = channels // groups
    lags = [2 * size - 1 for size in others]
    half = maps.new_zeros(channels, per_group, first, *lags)  # lags from 0 on in the first dimension
    for part in maps.tensor_split(pieces(len(maps), maps[:, 0].numel(), _POSITIONS)):
        ahead = F.pad(part, [0, 0] * (ndim - 1) + [0, window.reach[0]])
        half += _WEIGHT_GRADIENTS[ndim](
            ahead, half.shape, part, padding=(0, *window.reach[1:]), dilation=window.dilation, groups=groups
        )
    half = half.view(groups, per_group, per_group, first, *lags)
    mirrored = half.narrow(3, 1, first - 1).flip(tuple(range(3, 3 + ndim))).transpose(1, 2)
    return torch.cat((mirrored, half), 3)


@dataclass(frozen=True, kw_only=True)
class Border:
    """The slices of the maps that overhanging windows meet at both ends of a dimension.

    Attributes:
        dim: The dimension.
        thickness: The number of elements of it that they meet.
        lines: These elements at each end, slices of the maps.
        covered: The first kernel offset that meets them, at each end.
        window: The window in the other dimensions: at the convolution's positions before `dim`, at all after it.
    """

    dim: int
    thickness: int
    lines: list[Tensor]
    covered: list[int]
    window: Window


def overhangs(maps: Tensor, window: Window) -> Iterator[Border]:
    """Yield the slices that a stride-1 window meets where it is not at a position of the convolution."""
    positions, everywhere = window.positions(tuple(maps.shape[2:])), tuple((reach, reach) for reach in window.reach)
    for dim, (size, kernel, spread) in enumerate(zip(maps.shape[2:], window.kernel_size, window.dilation, strict=True)):
        start = -window.padding[dim][0]  # where the window of the first position begins
        ends: dict[int, list[tuple[int, Tensor]]] = {}
        for origin in (*range(-window.reach[dim], start), *range(start + positions[dim], size)):
            offsets = [offset for offset in range(kernel) if 0 <= origin + spread * offset < size]
            if offsets:  # not between two elements of a dilated kernel
                met = slice(origin + spread * offsets[0], origin + spread * offsets[-1] + 1, spread)
                line = maps[(slice(None),) * (2 + dim) + (met,)]
                ends.setdefault(len(offsets), []).append((offsets[0], line))
        others = Window(
            kernel_size=_without(window.kernel_size, dim),
            stride=_without(window.stride, dim),
            padding=(*window.padding[:dim], *everywhere[dim + 1 :]),
            dilation=_without(window.dilation, dim),
        )
        for thickness, met_lines in ends.items():
            covered, lines = zip(*met_lines, strict=True)
            yield Border(dim=dim, thickness=thickness, lines=list(lines), covered=list(covered), window=others)


def _spread_lags(out: Tensor, sums: Tensor, kernel: tuple[int, ...], *, piece: int) -> None:
    """Add ``sums`` ``[n, c, c', *lags]`` to every pair of kernel offsets that far apart, in the lower triangles."""
    groups, channels, _, *sizes = sums.shape
    lags, offsets = math.prod(sizes), math.prod(kernel)
    lag = torch.arange(lags, device=out.device).view(sizes)
    for dim, size in enumerate(kernel):
        lag = lag.unfold(dim, size, 1)
    lag = lag.flip(tuple(range(len(kernel)))).reshape(offsets, 1, offsets)  # the index of q - p for offsets p, q
    blocks = out.view(groups, channels, offsets, channels * offsets)
    step = max(1, min(64, piece // (groups * channels * offsets**2)))
    for start in range(0, channels, step):
        stop = min(start + step, channels)
        where = (lag + lags * torch.arange(stop, device=out.device)[:, None]).flatten()
        target = blocks[:, start:stop, :, : stop * offsets]
        values = sums[:, start:stop].reshape(groups * (stop - start), -1).index_select(1, where).view(target.shape)
        target.add_(values)


def _without(values: tuple[_T, ...], index: int) -> tuple[_T, ...]:
    return (*values[:index], *values[index + 1 :])
