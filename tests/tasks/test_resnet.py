"""The residual networks are those of the paper."""

import pytest
import torch
from torch import nn

from natgrad.tasks.resnet import Block, ResNet


def test_shortcut_passes_old_channels_and_starts_new_ones_from_zero() -> None:
    block = Block(2, 5, stride=2).eval()
    nn.init.zeros_(block.body[2][0].weight)
    images = torch.rand(3, 2, 8, 8)
    out = block(images)
    assert torch.equal(out[:, :2], images[:, :, ::2, ::2])
    assert not out[:, 2:].any()


@pytest.mark.parametrize("depth", [2, 19, 0])
def test_other_depths_are_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth={depth}"):
        ResNet(depth, 10)
