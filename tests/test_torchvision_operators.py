"""The operators in Python that stand in for torchvision's compiled ones."""

import sys

import pytest
import torch

pytest.importorskip("torchvision")

from torchvision import ops


def boxes(count):
    corners = 12 * torch.rand(count, 2, dtype=torch.float64)
    return torch.cat((corners, corners + 8 * torch.rand(count, 2, dtype=torch.float64)), 1)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("ratio", [2, 1, -1])
def test_roi_align_and_its_gradient_equal_torchvisions_differentiable_function(ratio, aligned):
    plain = sys.modules["torchvision.ops.roi_align"]._roi_align.__wrapped__
    image = torch.randn(2, 3, 10, 13, dtype=torch.float64, requires_grad=True)
    rois = torch.cat((torch.arange(7)[:, None] % 2, boxes(7)), 1)
    expected = plain(image, rois, 0.5, 3, 4, ratio, aligned)
    actual = ops.roi_align(image, rois, (3, 4), 0.5, ratio, aligned)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(actual)
    both = [torch.autograd.grad((values * weights).sum(), image)[0] for values in (actual, expected)]
    torch.testing.assert_close(*both)
    assert ops.roi_align(image, rois[:0], (3, 4)).shape == (0, 3, 3, 4)


def test_nms_keeps_what_overlaps_with_no_better_box():
    few, scores = boxes(40), torch.rand(40)
    overlaps, kept = ops.box_iou(few, few), []
    for index in scores.argsort(descending=True).tolist():
        if all(overlaps[index, other] <= 0.3 for other in kept):
            kept.append(index)
    assert ops.nms(few, scores, 0.3).tolist() == kept
    assert 1 < len(kept) < 40
    assert ops.nms(few[:0], scores[:0], 0.3).shape == (0,)
