"""Gram products of rows, which all other Gram products use."""

from collections.abc import Iterable
from math import ceil

import torch
from torch import Tensor

from natgrad.linalg.device import adds_in_float32, on_host

_CPU_PANEL, _GPU_PANEL = 112, 1024
"""About how many rows of a product are computed at a time, or a twelfth of all. A GPU needs few large products."""


def add_row_gram_(out: Tensor, rows: Tensor, *, scale: float = 1.0, bias: bool = False) -> None:
    """Add ``scale`` XᵀX to the lower triangle of ``out``.

    X are ``rows``, with a trailing 1 appended to each when ``bias``. The ones are not stored: their products are the
    sum of the rows and their number. On one core this takes 0.8, 0.7 and 0.65 of the time of the full product at
    d = 256, 576 and 1024.

    Args:
        out: ``[d, d]`` or stacked ``[N, d, d]``, with one more row and column when ``bias``.
        rows: ``[m, d]`` or stacked ``[N, m, d]``, of any strides and floating dtype. They are cast to that of ``out``,
            unless `adds_in_float32` (Osawa 2019, 3.4).
        scale: Factor of the product.
        bias: Whether the rows end in a 1.
    """
    size = rows.shape[-1]
    if not (out.dtype == torch.float32 and adds_in_float32(rows)):
        rows = rows.to(out.dtype)
    if out.ndim == 3 and len(out) == 1:
        out, rows = out[0], rows.flatten(0, -2)
    panels = max(1, min(ceil(size / (_CPU_PANEL if on_host(out) else _GPU_PANEL)), 12))
    step = 16 * max(1, ceil(size / (16 * panels)))  # of nearly equal height
    for start in range(0, size, step):
        stop = min(start + step, size)
        _add_product_(out[..., start:stop, :stop], rows[..., start:stop].mT, rows[..., :stop], scale)
    if bias:
        add_bias_row_(out, rows, rows.shape[-2], scale=scale)


def add_column_grams_(out: Tensor, pieces: Iterable[Tensor], *, scale: float = 1.0) -> None:
    """Add ``scale`` X Xᵀ for every X ``[N, d, m]`` of ``pieces``, as `add_row_gram_` does for its transpose."""
    for columns in pieces:
        add_row_gram_(out, columns.transpose(1, 2), scale=scale)


def add_bias_row_(out: Tensor, rows: Tensor, count: int, *, scale: float = 1.0) -> None:
    """Add ``scale`` times Σ rows and `count` to the last row of ``out``, which has one more column than rows."""
    ones = rows.new_ones(*rows.shape[:-2], 1, rows.shape[-2])  # a product, as it is twice as fast as a sum
    _add_product_(out[..., -1:, :-1], ones, rows, scale)
    out[..., -1, -1].add_(scale * count)


def _add_product_(out: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """Add ``scale`` times a product of matrices or stacked ones, whose dtype may be narrower than that of ``out``."""
    if left.dtype == out.dtype:
        (Tensor.addmm_ if out.ndim == 2 else Tensor.baddbmm_)(out, left, right, alpha=scale)
    else:
        out.add_((torch.mm if out.ndim == 2 else torch.bmm)(left, right, out_dtype=out.dtype), alpha=scale)
