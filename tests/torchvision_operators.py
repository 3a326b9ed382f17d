"""Declares torchvision's operators where its compiled part was built for another torch, so that it can be imported."""

import importlib.util
import sys

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float scale, int height, int width, int ratio, bool aligned) -> Tensor",
    "qroi_align(Tensor input, Tensor rois, float scale, int height, int width, int ratio, bool aligned) -> Tensor",
    "_roi_align_backward(Tensor grad, Tensor rois, float scale, int height, int width, int batch, int channels, "
    "int rows, int columns, int ratio, bool aligned) -> Tensor",
    *(
        f"{name}(Tensor input, Tensor rois, float scale, int height, int width{ratio}) -> (Tensor, Tensor)"
        for name, ratio in (("ps_roi_align", ", int ratio"), ("roi_pool", ""), ("ps_roi_pool", ""))
    ),
    *(f"_{name}_backward(Tensor grad) -> Tensor" for name in ("ps_roi_align", "roi_pool", "ps_roi_pool")),
    "deform_conv2d(Tensor input) -> Tensor",
    "_deform_conv2d_backward(Tensor grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def declare() -> None:
    """Make ``import torchvision`` work if it is installed. The operators have no body: detection models don't run."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in SCHEMAS:
            library.define(schema)
        _KEPT.append(library)


_KEPT: list[torch.library.Library] = []  # an operator lives as long as its library
