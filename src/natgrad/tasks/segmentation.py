"""A class for each pixel: LGG's brain scans and Cityscapes from a folder, or embedded scenes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from natgrad.tasks import applications, scenes
from natgrad.tasks.applications.segmentation import IGNORED, MULTIPLE
from natgrad.tasks.base import Evaluator, Samples, Task
from natgrad.tasks.evaluators import dice, mean_iou
from natgrad.tasks.images import Images, normalise
from natgrad.tasks.layouts import cityscapes, lgg, pairs
from natgrad.tasks.layouts.pairs import Pair
from natgrad.tasks.multiscale import MultiScale
from natgrad.tasks.pictures import read
from natgrad.tasks.unet import UNet
from natgrad.tasks.unreadable import Unreadable

_SCENES = 256  # embedded; a quarter as many for testing

# Of ImageNet's pictures, as the authors of the multi-scale net take.
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_READERS: dict[str, tuple[Callable[[Path], tuple[list[Pair], list[Pair]]], Mapping[int, int]]] = {
    "lgg": (lgg.read, lgg.CLASSES),
    "cityscapes": (cityscapes.read, cityscapes.CLASSES),
}
_NETWORKS: dict[str, Callable[[int], nn.Module]] = {"multiscale": MultiScale, "unet": UNet}


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A square part of a picture, scaled, turned and mirrored at random.

    Attributes:
        side: Pixels of its side.
        scales: The least and the largest size of what it shows.
        degrees: The largest angle that it is turned by, either way.
        outside: The class of what is outside the picture, which is black.
    """

    side: int
    scales: tuple[float, float]
    degrees: float
    outside: int

    def __call__(self, picture: Image.Image, mask: Image.Image, draws: Sequence[float]) -> tuple[Image.Image, ...]:
        """Return the same part of a picture and of its mask; five random numbers in [0, 1) say which."""
        scale, turn, right, down, flip = draws
        scale = self.scales[0] * (self.scales[1] / self.scales[0]) ** scale
        angle = math.radians(self.degrees * (2 * turn - 1))
        half = self.side / 2
        # The middle of a part within the picture, or of a part with the picture within it.
        middle = [
            sorted((half / scale, length - half / scale))[0] + draw * abs(length - self.side / scale)
            for length, draw in zip(picture.size, (right, down), strict=True)
        ]
        cosine, sine = math.cos(angle) / scale, math.sin(angle) / scale
        mirror = -1 if flip < 0.5 else 1
        # Of the inverse map: from a place in the part to the one in the picture.
        rows = ((mirror * cosine, -sine), (mirror * sine, cosine))
        affine = [number for row, start in zip(rows, middle, strict=True) for number in (*row, start - half * sum(row))]
        size = (self.side, self.side)
        method = Image.Transform.AFFINE
        return (
            picture.transform(size, method, affine, Image.Resampling.BILINEAR),
            mask.transform(size, method, affine, Image.Resampling.NEAREST, fillcolor=self.outside),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs:
    """Pictures and masks in files, decoded when they are needed.

    The next pair that can be read takes the place of one that cannot.

    Attributes:
        files: The paths of each picture and of its mask.
        classes: The class of each value of a mask.
        cut: Cuts training pictures.
        unreadable: The pairs that could not be read.
        draw: The seed and epoch of the augmentation; None: whole pictures.
    """

    files: Sequence[Pair]
    classes: Mapping[int, int]
    cut: Cut
    unreadable: Unreadable
    draw: tuple[int, int] | None = None

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.files)

    def __getitem__(self, indices: list[int] | slice) -> tuple[Tensor, Tensor]:
        """Return normalised pictures [B, 3, H, W] and the classes of their pixels [B, H, W].

        Raises:
            DataError: A hundred pairs in a row cannot be read.
        """
        chosen = range(len(self))[indices] if isinstance(indices, slice) else indices
        read = [self.unreadable.substitute(self._read, index) for index in chosen]
        pictures, masks = zip(*read, strict=True)
        pixels = torch.stack(pictures).permute(0, 3, 1, 2)
        return normalise(pixels, _MEAN, _DEVIATION), torch.stack(masks).long()

    def augmented(self, seed: int, epoch: int) -> Pairs:
        """Return the pictures of an epoch. Their augmentation follows from seed, epoch and sample alone."""
        return replace(self, draw=(seed, epoch))

    def _read(self, index: int) -> tuple[Tensor, ...]:
        file, mask_file = self.files[index]
        picture, mask = read(file, "RGB"), pairs.read_mask(mask_file, self.classes)
        if self.draw is not None:
            draws = np.random.default_rng((*self.draw, index)).random(5).tolist()
            picture, mask = self.cut(picture, mask, draws)
        return torch.from_numpy(np.array(picture)), torch.from_numpy(np.array(mask))


@dataclass(frozen=True, kw_only=True)
class Segmentation(applications.Segmentation, Task):
    """The data, model and loss of the task."""

    def load(self) -> tuple[Samples, Samples]:
        """Return normalised pictures with the class of each pixel."""
        source = self.data_set
        side = self.side or source.side
        if self.data is None:
            drawn = scenes.scenes(_SCENES, side=side)
            return self._embedded(drawn[0]), self._embedded(drawn[1])
        read_files, classes = _READERS[self.source]
        parts = read_files(Path(self.data))
        pairs.check_sizes([*parts[0], *parts[1]], MULTIPLE)
        cut = Cut(side=side, scales=source.scales, degrees=source.degrees, outside=source.outside)
        train, test = (Pairs(files=part, classes=classes, cut=cut, unreadable=Unreadable(len(part))) for part in parts)
        return train, test

    def unreadable(self) -> list[str]:
        """Return the pictures that could not be read, or whose mask could not."""
        if self.data is None:
            return []
        parts: Any = self.datasets()
        return [str(part.files[index][0]) for part in parts for index in part.unreadable.indices()]

    def _embedded(self, part: scenes.Scenes) -> Images:
        classes = part.classes()
        labels = (classes > 0).long() if self.is_binary else classes
        return Images(pixels=part.pictures, labels=labels, mean=_MEAN, deviation=_DEVIATION)

    def augmented(self, train: Any, *, seed: int, epoch: int) -> Samples:
        """Return parts of training pictures from a folder, unless switched off; scenes are random already."""
        is_changed = self.augment and isinstance(train, Pairs)
        changed: Samples = train.augmented(seed, epoch) if is_changed else train
        return changed

    def model(self) -> nn.Module:
        """Build a network from [B, 3, H, W] to logits [B, H, W, classes], of two classes only that of the second."""
        return _NETWORKS[self.architecture](1 if self.is_binary else self.data_set.classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy in nats, the mean over the pixels that count, or 0 if none does."""
        if self.is_binary:
            return functional.binary_cross_entropy_with_logits(outputs[..., 0], targets.to(outputs.dtype))
        mask = targets != IGNORED
        total = functional.cross_entropy(
            outputs.flatten(0, 2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total / mask.sum().clamp(min=1)

    def mask(self, targets: Tensor) -> Tensor | None:
        """Return which pixels count."""
        return None if self.is_binary else targets != IGNORED

    def count(self, targets: Tensor) -> float | None:
        """Return the number of pixels that count; a float, as the last layer may have fewer positions than pixels."""
        mask = self.mask(targets)
        return None if mask is None else float(mask.sum())

    def evaluator(self) -> Evaluator:
        """Return a metric of Dice's coefficient over all pixels, or of the mean intersection over union."""
        return dice() if self.is_binary else mean_iou(self.data_set.classes, IGNORED)
