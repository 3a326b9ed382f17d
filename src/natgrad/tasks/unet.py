"""U-Net (Ronneberger et al. 2015) in the form that is usual for LGG's brain scans (Buda et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class UNet(nn.Module):
    """Four halvings and four doublings of the sides, with padded convolutions and batch norm.

    Args:
        outputs: Logits of each pixel.
        channels: Input channels.
        width: Channels of the first level; each further one has twice as many.
    """

    def __init__(self, outputs: int, channels: int = 3, width: int = 32) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        before = [channels, *widths[:-1]]
        self.down = nn.ModuleList(_block(*pair) for pair in zip(before, widths, strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * after, after, 2, stride=2) for after in widths[-2::-1])
        self.join = nn.ModuleList(_block(2 * after, after) for after in widths[-2::-1])
        self.head = nn.Conv2d(width, outputs, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, C, H, W] to logits [B, H, W, outputs]; H and W are multiples of 16."""
        levels = [self.down[0](images)]
        for block in self.down[1:]:
            levels.append(block(functional.max_pool2d(levels[-1], 2)))
        features = levels.pop()
        for up, join in zip(self.up, self.join, strict=True):
            features = join(torch.cat((up(features), levels.pop()), dim=1))
        logits: Tensor = self.head(features)
        return logits.movedim(1, -1)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (inputs, outputs):
        layers += [nn.Conv2d(before, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)
