"""Patch covariance of a stride-1 convolution by lags, without patches.

Were the kernel allowed to overhang the maps everywhere, so that every element met every kernel offset, the product
summed for offsets p and q would depend on their *lag* q - p alone: A[p, q] = R[q - p], R[λ] = Σ_u x[u] x[u + λ]ᵀ. These
are (2k - 1) lags a dimension, half of them by symmetry, instead of k² pairs; and R is the weight gradient of a
convolution of the maps with themselves, which runs at nearly the speed of a matrix product. What the overhanging
positions added beyond the true ones is then taken off: they lie on the border and see only slices of the maps. On one
core this takes 0.08, 0.14 and 0.25 of the time of unfolding and multiplying in the three stages of a CIFAR ResNet
(`benchmarks/gram.py`).
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn import grad as gradients

from natgrad.gram.rows import add_column_grams_
from natgrad.gram.windows import Window, pieces

_WEIGHT_GRADIENTS = {1: gradients.conv1d_weight, 2: gradients.conv2d_weight, 3: gradients.conv3d_weight}
_POSITIONS = 1 << 13
"""Positions that one convolution sums: its float32 error grows with them, to 5e-7 at this number (2e-6 at 2^16)."""


def add_lag_gram_(
    out: Tensor, maps: Tensor, window: Window, groups: int, *, scale: float, overwrite: bool, piece: int
) -> None:
    """Add ``scale`` times the patch covariance of a stride-1 convolution to the lower triangles of ``out``.

    Args:
        out: ``[n, i, i]``.
        maps: ``[B, C, *spatial]``, not empty, of the dtype of ``out``.
        window: The convolution; its strides are 1.
        groups: Number of channel groups n.
        scale: Factor of the covariance.
        overwrite: Whether to write rather than to add.
        piece: Elements to copy at a time.
    """
    kernel, channels = window.kernel_size, maps.shape[1] // groups
    _spread_lags(out, lag_sums(maps, window, groups).mul_(scale), kernel, overwrite=overwrite, piece=piece)
    blocks = out.view(groups, channels, *kernel, channels, *kernel)
    for taken, seen, covered in overhangs(maps, window):
        width = channels * math.prod(seen.kernel_size)
        border = out.new_empty(groups, width, width)
        add_column_grams_(border, seen.columns(taken, groups, piece), scale=-scale, overwrite=True)
        target = blocks[(slice(None), slice(None), *covered, slice(None), *covered)]
        target.add_(border.view(target.shape))


def lag_sums(maps: Tensor, window: Window, groups: int) -> Tensor:
    """Sum the products of all elements that are a lag apart.

    Args:
        maps: ``[B, C, *spatial]``.
        window: The convolution; its kernel and dilation are used.
        groups: Number of channel groups n; c = C/n.

    Returns:
        ``[n, c, c', 2k - 1 for each dimension]``: Σ x_c[u] x_c'[u + dilation · λ], λ counted from 1 - k. Cost:
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


def overhangs(maps: Tensor, window: Window) -> Iterator[tuple[Tensor, Window, list[slice]]]:
    """Yield what a stride-1 window sees where it meets the maps without being a position of the convolution.

    Yields:
        Slices of ``maps``, the window over them, and the range of kernel offsets that it covers. Dimension by
        dimension: overhanging there, at the convolution's own positions before, anywhere after.
    """
    positions, everywhere = window.positions(tuple(maps.shape[2:])), tuple((reach, reach) for reach in window.reach)
    for dim, (size, kernel, spread) in enumerate(zip(maps.shape[2:], window.kernel_size, window.dilation, strict=True)):
        start = -window.padding[dim][0]  # where the window of the first position begins
        for origin in (*range(-window.reach[dim], start), *range(start + positions[dim], size)):
            offsets = [offset for offset in range(kernel) if 0 <= origin + spread * offset < size]
            if not offsets:  # between two elements of a dilated kernel
                continue
            met = slice(origin + spread * offsets[0], origin + spread * offsets[-1] + 1, spread)
            seen = Window(
                kernel_size=_replaced(window.kernel_size, dim, len(offsets)),
                stride=window.stride,
                padding=(*window.padding[:dim], (0, 0), *everywhere[dim + 1 :]),
                dilation=_replaced(window.dilation, dim, 1),
            )
            covered = [slice(None)] * len(positions)
            covered[dim] = slice(offsets[0], offsets[-1] + 1)
            yield maps[(slice(None),) * (2 + dim) + (met,)], seen, covered


def _spread_lags(out: Tensor, sums: Tensor, kernel: tuple[int, ...], *, overwrite: bool, piece: int) -> None:
    """Add ``sums`` ``[n, c, c', *lags]`` to every pair of kernel offsets that far apart, in the lower triangles."""
    groups, channels, _, *sizes = sums.shape
    lags, offsets = math.prod(sizes), math.prod(kernel)
    lag = torch.arange(lags, device=out.device).view(sizes)
    for dim, size in enumerate(kernel):
        lag = lag.unfold(dim, size, 1)
    lag = lag.flip(tuple(range(len(kernel)))).reshape(offsets, 1, offsets)  # where q - p is found for offsets p, q
    blocks = out.view(groups, channels, offsets, channels * offsets)
    step = max(1, min(64, piece // (groups * channels * offsets**2)))
    for start in range(0, channels, step):
        stop = min(start + step, channels)
        where = (lag + lags * torch.arange(stop, device=out.device)[:, None]).flatten()
        target = blocks[:, start:stop, :, : stop * offsets]
        values = sums[:, start:stop].reshape(groups * (stop - start), -1).index_select(1, where).view(target.shape)
        if overwrite:
            target.copy_(values)
        else:
            target.add_(values)


def _replaced(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
