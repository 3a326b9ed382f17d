"""Small images in memory, normalised and augmented batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


def normalise(pixels: Tensor, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    """Return pixels [B, C, H, W], uint8, in [0, 1] minus each channel's mean, divided by its deviation."""
    middle, spread = (torch.tensor(value)[:, None, None] for value in (mean, deviation))
    return (pixels / 255 - middle) / spread


@dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """Labelled images.

    Attributes:
        pixels: uint8 [N, C, H, W].
        labels: int64 [N].
        mean: The mean of each channel in [0, 1], which is subtracted.
        deviation: The deviation of each channel, which the difference is divided by.
        padding: Pixels of black around an image before a part of its size is cut out at random.
        flip: Whether to mirror half of the images.
        side: The pixels of a side to which images are resized; None: they stay as they are.
        draws: Random numbers [N, 3] in [0, 1) for row, column and mirroring; None: no augmentation.
    """

    pixels: Tensor
    labels: Tensor
    mean: Sequence[float]
    deviation: Sequence[float]
    padding: int = 0
    flip: bool = False
    side: int | None = None
    draws: Tensor | None = None

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.pixels)

    def __getitem__(self, indices: list[int] | slice) -> tuple[Tensor, Tensor]:
        """Return normalised images [B, C, H, W] and labels [B]."""
        pixels = self.pixels[indices]
        if self.draws is not None:
            pixels = self._augment(pixels, self.draws[indices])
        images = normalise(pixels, self.mean, self.deviation)
        if self.side is not None:
            images = functional.interpolate(images, size=(self.side, self.side), mode="bilinear")
        return images, self.labels[indices]

    def augmented(self, seed: int, epoch: int) -> Images:
        """Return the images of an epoch. Their augmentation follows from seed, epoch and sample alone."""
        draws = np.random.default_rng((seed, epoch)).random((len(self), 3), dtype=np.float32)
        return replace(self, draws=torch.from_numpy(draws))

    def _augment(self, pixels: Tensor, draws: Tensor) -> Tensor:
        """Cut a part out of each padded image, and mirror it or not."""
        count, channels, height, width = pixels.shape
        corner = (draws[:, :2] * (2 * self.padding + 1)).long()
        rows = corner[:, :1] + torch.arange(height)
        columns = corner[:, 1:] + torch.arange(width)
        if self.flip:
            columns = torch.where(draws[:, 2:] < 0.5, columns.flip(1), columns)
        padded = functional.pad(pixels, [self.padding] * 4)
        image, channel = torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None]
        return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]
