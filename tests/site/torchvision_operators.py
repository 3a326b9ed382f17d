"""The operators of torchvision in Python, for where its compiled part was built for another torch.

The operators of detection models have bodies. The others are declared only.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

DECLARED = (
    "qroi_align(Tensor input, Tensor rois, float scale, int height, int width, int ratio, bool aligned) -> Tensor",
    *(
        f"{name}(Tensor input, Tensor rois, float scale, int height, int width{ratio}) -> (Tensor, Tensor)"
        for name, ratio in (("ps_roi_align", ", int ratio"), ("roi_pool", ""), ("ps_roi_pool", ""))
    ),
    *(f"_{name}_backward(Tensor grad) -> Tensor" for name in ("ps_roi_align", "roi_pool", "ps_roi_pool")),
    "deform_conv2d(Tensor input) -> Tensor",
    "_deform_conv2d_backward(Tensor grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Return the indices of boxes [n, 4] that overlap with no kept one of higher score by more than a threshold."""
    order = scores.argsort(descending=True, stable=True)
    corner, end = dets[order, None, :2], dets[order, None, 2:]
    area = (end - corner).prod(-1)
    shared = (torch.minimum(end, end.transpose(0, 1)) - torch.maximum(corner, corner.transpose(0, 1))).clamp(min=0)
    overlap = shared.prod(-1)
    covers = (overlap > iou_threshold * (area + area.T - overlap)).triu(1)
    kept = torch.ones(len(order), dtype=torch.bool)
    for index in range(len(order)):
        if kept[index]:
            kept &= ~covers[index]
    return order[kept]


def roi_align(image: Tensor, rois: Tensor, scale: float, height: int, width: int, ratio: int, aligned: bool) -> Tensor:
    """Return the mean of bilinear samples in height x width bins of each region (index, x, y, x, y) of images."""
    results = [image.new_zeros(0, image.shape[1], height, width)]
    for roi in rois:
        down, across = _weights(roi, scale, (height, width), image.shape[2:], ratio, aligned)
        results.append(torch.einsum("ph,chw,qw->cpq", down, image[int(roi[0])], across)[None])
    return torch.cat(results)


def roi_align_backward(
    gradient: Tensor,
    rois: Tensor,
    scale: float,
    height: int,
    width: int,
    batch: int,
    channels: int,
    rows: int,
    columns: int,
    ratio: int,
    aligned: bool,
) -> Tensor:
    """Return the gradient of the images [batch, channels, rows, columns]."""
    result = gradient.new_zeros(batch, channels, rows, columns)
    for roi, own in zip(rois, gradient, strict=True):
        down, across = _weights(roi, scale, (height, width), (rows, columns), ratio, aligned)
        result[int(roi[0])] += torch.einsum("ph,cpq,qw->chw", down, own, across)
    return result


def _weights(
    roi: Tensor, scale: float, bins: Sequence[int], sides: Sequence[int], ratio: int, aligned: bool
) -> list[Tensor]:
    """Return the weights of an image's rows in each row of bins, and of its columns in each column of them."""
    found = []
    start, end = (roi[1:] * scale - (0.5 if aligned else 0.0)).view(2, 2).flip(1)  # y first
    for axis, (count, side) in enumerate(zip(bins, sides, strict=True)):
        size = end[axis] - start[axis]
        size = (size if aligned else size.clamp(min=1)) / count
        samples = ratio if ratio > 0 else max(1, int(size.ceil()))
        points = start[axis] + (torch.arange(count * samples, dtype=roi.dtype) + 0.5) * size / samples
        # Points up to a pixel outside count as at the edge, others as 0.
        inside = (points >= -1) & (points <= side)
        near = (1 - (points.clamp(0, side - 1)[:, None] - torch.arange(side)).abs()).clamp(min=0)
        found.append((near * inside[:, None]).view(count, samples, side).mean(1))
    return found


IMPLEMENTED: dict[str, Callable[..., object]] = {
    "_cuda_version() -> int": lambda: -1,  # none
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor": nms,
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor": nms,
    "roi_align(Tensor input, Tensor rois, float scale, int height, int width, int ratio, bool aligned) -> Tensor": (
        roi_align
    ),
    "_roi_align_backward(Tensor grad, Tensor rois, float scale, int height, int width, int batch, int channels, "
    "int rows, int columns, int ratio, bool aligned) -> Tensor": roi_align_backward,
}

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # an operator lives as long as its library


def _define() -> None:
    for schema in DECLARED:
        _LIBRARY.define(schema)
    for schema, body in IMPLEMENTED.items():
        _LIBRARY.impl(_LIBRARY.define(schema), body, "CompositeExplicitAutograd")


@contextmanager
def defined() -> Iterator[None]:
    """Define the operators where torch cannot load torchvision's compiled part."""
    load = torch.ops.load_library

    def load_or_define(file: str) -> None:
        try:
            load(file)
        except OSError:
            if not Path(file).stem.startswith("_C"):
                raise
            _define()

    with mock.patch.object(torch.ops, "load_library", load_or_define):
        yield
