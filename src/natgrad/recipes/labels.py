"""Labels as class probabilities."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from natgrad.errors import describe, require
from natgrad.schedule import check_number, check_whole


def soft_labels(targets: Tensor, classes: int, *, smoothing: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``(1 - s) onehot(y) + s / C``: one-hot labels, or smoothed ones.

    Their cross-entropy equals ``cross_entropy(..., label_smoothing=s)``. Use them to mix labels.

    Args:
        targets: y, class indices ``[...]``.
        classes: C, the number of classes.
        smoothing: s, in [0, 1] (Szegedy et al. 2016, "Rethinking the Inception architecture", section 7; 0.1 in
            Pauloski 2022, section 6.3.1).
        dtype: The dtype of the result.

    Returns:
        Class probabilities ``[..., C]``.

    Raises:
        ValueError: if `targets` are not integers from 0 to C - 1, or another argument is not allowed.
    """
    require(isinstance(targets, Tensor), "targets", targets, "a tensor of classes")
    whole = not targets.is_floating_point() and not targets.is_complex() and targets.dtype != torch.bool
    require(whole, "targets", describe(targets), "numbers of classes")
    check_number("smoothing", smoothing, "a share in [0, 1]", minimum=0)
    require(smoothing <= 1, "smoothing", smoothing, "a share in [0, 1]")
    check_whole("classes", classes, 1, 2**31 - 1)
    within = not targets.numel() or (int(targets.min()) >= 0 and int(targets.max()) < classes)
    require(within, "targets", describe(targets), f"classes from 0 to {classes - 1}, as classes={classes}")
    fits = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    require(fits, "dtype", dtype, "a floating point dtype of at least 16 bits")
    return one_hot(targets.long(), classes).to(dtype).mul_(1 - smoothing).add_(smoothing / classes)
