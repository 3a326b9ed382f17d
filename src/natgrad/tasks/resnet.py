"""The residual networks for 32x32 images of He et al. 2016, "Deep residual learning for image recognition", 4.2."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad.errors import require

WIDTHS = (16, 32, 64)


def convolution(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Return a 3x3 convolution with its batch normalisation."""
    layer = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """Two convolutions with a shortcut without parameters (option A of the paper).

    Args:
        inputs: Input channels.
        outputs: Output channels; the shortcut is padded with zero channels.
        stride: The stride of the first convolution and the shortcut.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = outputs - inputs
        self.body = nn.Sequential(convolution(inputs, outputs, stride), nn.ReLU(), convolution(outputs, outputs, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, H / stride, W / stride]."""
        shortcut = images[:, :, :: self.stride, :: self.stride]
        shortcut = functional.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels))
        return torch.relu(self.body(images) + shortcut)


class ResNet(nn.Sequential):
    """Maps images [B, channels, H, W] to logits [B, classes].

    Args:
        depth: Layers with weights: 6 n + 2, such as 20 or 32.
        classes: The number of logits.
        channels: Input channels.

    Raises:
        ValueError: The depth is not 6 n + 2 with n >= 1.
    """

    def __init__(self, depth: int, classes: int, channels: int = 3) -> None:
        blocks, rest = divmod(depth - 2, 6)
        require(rest == 0 and blocks >= 1, "depth", depth, "6 n + 2 with n >= 1")
        stages: list[nn.Module] = []
        inputs = WIDTHS[0]
        for stage, outputs in enumerate(WIDTHS):
            for block in range(blocks):
                stages.append(Block(inputs, outputs, stride=2 if stage and not block else 1))
                inputs = outputs
        super().__init__(
            convolution(channels, WIDTHS[0], 1),
            nn.ReLU(),
            *stages,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(WIDTHS[-1], classes),
        )
