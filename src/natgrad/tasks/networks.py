"""The models of image classification, for any number of channels and classes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from natgrad.tasks.resnet import ResNet


class ThreeConvolutions(nn.Sequential):
    """Three convolutions and a linear layer ("3C1F", Mu et al. 2022, which does not print its widths).

    Maps images [B, channels, side, side] to logits [B, classes].

    Args:
        channels: Input channels.
        side: Pixels of a side, at least 4.
        classes: The number of logits.
    """

    def __init__(self, channels: int, side: int, classes: int) -> None:
        super().__init__(
            nn.Conv2d(channels, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (side // 4) ** 2, classes),
        )


class VGG16(nn.Sequential):
    """VGG-16 (Simonyan and Zisserman 2015, D) for small images: batch norm, and one linear layer.

    Maps images [B, channels, H, W] of at most 32 x 32 pixels to logits [B, classes].

    Args:
        channels: Input channels.
        classes: The number of logits.
    """

    def __init__(self, channels: int, classes: int) -> None:
        layers: list[nn.Module] = []
        for outputs, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(depth):
                layer = nn.Conv2d(channels, outputs, kernel_size=3, padding=1)
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                layers += [layer, nn.BatchNorm2d(outputs), nn.ReLU()]
                channels = outputs
            # Rounding up keeps the last pixel of images that are smaller than 32 x 32.
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        super().__init__(*layers, nn.Flatten(), nn.Linear(channels, classes))


class _DenseLayer(nn.Sequential):
    """A 1x1 convolution to 4 times the growth rate and a 3x3 convolution; its outputs are appended to its inputs."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__(
            nn.BatchNorm2d(inputs),
            nn.ReLU(),
            _convolution(inputs, 4 * growth, 1),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(),
            _convolution(4 * growth, growth, 3),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, inputs + growth, H, W]."""
        return torch.cat((images, super().forward(images)), dim=1)


class DenseNet(nn.Sequential):
    """DenseNet-BC for small images (Huang et al. 2017), with a compression of one half.

    Maps images [B, channels, H, W] of at least 4 x 4 pixels to logits [B, classes].

    Args:
        channels: Input channels.
        classes: The number of logits.
        depth: Layers with weights: 6 n + 4.
        growth: Channels that each pair of convolutions adds.
    """

    def __init__(self, channels: int, classes: int, depth: int = 100, growth: int = 12) -> None:
        width = 2 * growth
        layers: list[nn.Module] = [_convolution(channels, width, 3)]
        for block in range(3):
            if block:
                layers += [nn.BatchNorm2d(width), nn.ReLU(), _convolution(width, width // 2, 1), nn.AvgPool2d(2)]
                width //= 2
            for _ in range((depth - 4) // 6):
                layers.append(_DenseLayer(width, growth))
                width += growth
        super().__init__(
            *layers,
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, classes),
        )


def _convolution(inputs: int, outputs: int, size: int) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, kernel_size=size, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight)
    return layer


def _resnet(depth: int) -> Callable[[int, int, int], nn.Module]:
    return lambda channels, side, classes: ResNet(depth, classes, channels)


NETWORKS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "3c1f": ThreeConvolutions,
    "densenet": lambda channels, side, classes: DenseNet(channels, classes),
    **{f"resnet{depth}": _resnet(depth) for depth in (20, 32, 56, 110)},
    "vgg16": lambda channels, side, classes: VGG16(channels, classes),
}
"""The models by name: functions of the input channels, the pixels of a side and the number of classes."""
