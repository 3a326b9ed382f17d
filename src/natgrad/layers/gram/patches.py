"""Gram products of feature maps: of channels (G of a convolution) and of patches (A)."""

import math

import torch
from torch import Tensor

from natgrad.layers.gram.lags import add_lag_gram_
from natgrad.layers.gram.rows import add_bias_row_, add_column_grams_, add_row_gram_
from natgrad.layers.gram.windows import Window, pieces
from natgrad.linalg.device import on_host

_CPU_PIECE, _GPU_PIECE = 1 << 18, 1 << 24
"""Elements to copy at a time, to fit a core's cache or to fill a GPU."""
_FEW = 64
"""Up to this number of channels a full product per sample is faster than copying the maps for half a product."""


def add_channel_gram_(out: Tensor, maps: Tensor, *, scale: float = 1.0) -> None:
    """Add ``scale`` Σ_b Σ_t g gᵀ to the lower triangles of ``out [n, c, c]``.

    g are the channels of ``maps [B, n c, *spatial]``.

    Maps may have any strides and floating dtype; see `add_row_gram_`.
    """
    groups, channels, _ = out.shape
    last = maps.movedim(1, -1)
    if groups == 1 and last.is_contiguous():  # channels-last maps are rows already
        add_row_gram_(out, last.reshape(1, -1, channels), scale=scale)
        return
    if channels <= _FEW and on_host(maps) and maps.is_contiguous() and maps.numel():
        samples = maps.to(out.dtype).view(-1, channels, maps[0, 0].numel())  # [B n, c, T]
        out.add_(torch.bmm(samples, samples.mT).view(-1, *out.shape).sum(0), alpha=scale)
        return
    parts = maps.tensor_split(pieces(len(maps), maps.numel(), _piece(out)))
    columns = (part.view(len(part), groups, channels, *part.shape[2:]).movedim(0, 2).flatten(2) for part in parts)
    add_column_grams_(out, columns, scale=scale)


def add_patch_gram_(out: Tensor, maps: Tensor, window: Window, *, bias: bool = False, scale: float = 1.0) -> None:
    """Add ``scale`` Σ_b Σ_t a aᵀ to the lower triangles of ``out [n, i, i]``.

    a are the patches of ``maps [B, C, *spatial]``; i is C/n · Π kernel_size, and one more when ``bias``: patches then
    end in a 1. Maps may have any strides and floating dtype; see `add_row_gram_`.
    """
    groups, piece = len(out), _piece(out)
    if on_host(maps):  # a GPU copies the patches as they are
        maps = maps.to(out.dtype)
    square = out[:, :-1, :-1] if bias else out
    if math.prod(window.kernel_size) == 1:
        # Positions on the padding contribute zero.
        sides = zip(window.padding, window.stride, strict=True)
        seen = tuple(slice(-before % step, None, step) for (before, _), step in sides)
        add_channel_gram_(square, maps[(slice(None), slice(None), *seen)], scale=scale)
    elif on_host(maps) and _lags_are_cheaper(maps.shape, window, groups):  # GPUs convolve in TF32
        add_lag_gram_(square, maps, window, groups, scale=scale, piece=piece)
    else:
        add_column_grams_(square, window.columns(maps, groups, piece), scale=scale)
    if bias:
        count = len(maps) * math.prod(window.positions(tuple(maps.shape[2:])))
        for columns in window.columns(maps.sum(0, keepdim=True, dtype=out.dtype), groups, piece):
            add_bias_row_(out, columns.transpose(1, 2), count, scale=scale)
            count = 0


def _lags_are_cheaper(shape: torch.Size, window: Window, groups: int) -> bool:
    """Predict whether lags cost less than patches.

    The unit is one multiply-add; other work is converted at 40 per nanosecond, measured on one core. Patches: 64 per
    copied element. Lags: at least 800 per element of the maps; 32 + i/9 per element of an overhanging patch; 100 for
    each of the i² entries; 5e6 per layer of overhanging positions; 1e7 per call. Convolutions with fewer than 8
    channels per group are slow.
    """
    batch, channels, *sizes = shape
    per_group, kernel = channels // groups, window.kernel_size
    if batch == 0 or any(step > 1 for step in window.stride) or (groups > 1 and per_group < 8):
        return False
    width = per_group * math.prod(kernel)
    positions = window.positions(tuple(sizes))
    layers = [max(0, size + reach - inner) for size, reach, inner in zip(sizes, window.reach, positions, strict=True)]
    overhanging = math.prod([inner + layer for inner, layer in zip(positions, layers, strict=True)])
    overhanging -= math.prod(positions)
    lags = math.prod([2 * size - 1 for size in kernel]) // 2 + 1
    patch_cost = batch * math.prod(positions) * groups * width * (width / 2 + 64)
    lag_cost = batch * math.prod(sizes) * (channels * per_group * lags + 800) + 5e6 * sum(layers) + 1e7
    lag_cost += groups * width * (batch * overhanging * (width / 9 + 32) + 100 * width)
    return lag_cost < patch_cost


def _piece(out: Tensor) -> int:
    return _CPU_PIECE if on_host(out) else _GPU_PIECE
