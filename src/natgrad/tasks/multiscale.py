"""Hierarchical multi-scale attention for segmentation (Tao et al. 2020). Needs torchvision."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from natgrad.tasks.vision import torchvision

_WIDTH = 256  # of the heads


class MultiScale(nn.Module):
    """One network for a picture at half and at full size; its attention at half size weights the logits of both.

    The trunk is a ResNet-50 whose features have an eighth of a picture's sides, as in the paper's ablations.

    Args:
        outputs: Logits of each pixel.
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        whole = torchvision("models").resnet50(replace_stride_with_dilation=[False, True, True])
        channels = whole.fc.in_features
        names = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
        self.trunk = nn.Sequential(*(getattr(whole, name) for name in names))
        self.attend = _head(channels, 1)
        self.segment = _head(channels, outputs)  # last, so that natural Muon takes its end as the model's

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to logits [B, H, W, outputs]."""
        half = functional.interpolate(images, scale_factor=0.5, mode="bilinear", align_corners=False)
        features = self.trunk(half)
        attention = _resized(self.attend(features).sigmoid(), half)
        low = attention * _resized(self.segment(features), half)
        high = _resized(self.segment(self.trunk(images)), images)
        logits = _resized(low, images) + (1 - _resized(attention, images)) * high
        return logits.movedim(1, -1)


def _resized(maps: Tensor, images: Tensor) -> Tensor:
    return functional.interpolate(maps, images.shape[2:], mode="bilinear", align_corners=False)


def _head(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (inputs, _WIDTH):
        layers += [nn.Conv2d(before, _WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(_WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(_WIDTH, outputs, 1, bias=False))
