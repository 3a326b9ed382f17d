"""Classes of small images: CIFAR, MNIST and Fashion-MNIST from a folder, or embedded characters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad.tasks import applications, digits, glyphs
from natgrad.tasks.base import Evaluator, Samples, Task
from natgrad.tasks.evaluators import accuracy
from natgrad.tasks.images import Images
from natgrad.tasks.layouts import cifar, idx
from natgrad.tasks.networks import NETWORKS

# Of the embedded glyphs; a quarter as many for testing.
_GLYPHS = 2048

Part = tuple[Tensor, Tensor]
"""Pixels, uint8 [N, C, H, W], and labels, int64 [N]."""

_READERS: dict[str, Callable[[str, Path], tuple[Part, Part]]] = {
    "cifar10": cifar.read,
    "cifar100": cifar.read,
    "mnist": idx.read,
    "fashion-mnist": idx.read,
}


def embedded_glyphs(count: int = _GLYPHS, side: int = glyphs.IMAGE) -> tuple[Part, Part]:
    """Return `count` embedded glyphs of a size for training and a quarter as many for testing."""
    (train, train_labels), (test, test_labels) = glyphs.pictures(count, seed=0, side=side)
    return (_bytes(train), train_labels), (_bytes(test), test_labels)


def _embedded_digits() -> tuple[Part, Part]:
    train, train_labels, test, test_labels = digits.scans()
    return (_bytes(train[:, None]), train_labels), (_bytes(test[:, None]), test_labels)


_EMBEDDED: dict[str, Callable[[], tuple[Part, Part]]] = {"glyphs": embedded_glyphs, "digits": _embedded_digits}


def _bytes(images: Tensor) -> Tensor:
    return (255 * images).round().to(torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Classification(applications.Classification, Task):
    """The data, model and loss of the task."""

    def load(self) -> tuple[Samples, Samples]:
        """Return images, normalised by the data set's mean and deviation, with their class."""
        source = self.data_set
        if self.data is not None:
            train, test = _READERS[self.source](self.source, Path(self.data))
            mean, deviation = source.mean, source.deviation
        else:
            train, test = self.embedded_images()
            spread, middle = torch.std_mean(train[0] / 255, dim=(0, 2, 3))
            mean, deviation = tuple(middle.tolist()), tuple(spread.tolist())
        (pixels, labels), (test_pixels, test_labels) = train, test
        return (
            Images(
                pixels=pixels,
                labels=labels,
                mean=mean,
                deviation=deviation,
                padding=source.padding,
                flip=source.flip,
            ),
            Images(pixels=test_pixels, labels=test_labels, mean=mean, deviation=deviation),
        )

    def embedded_images(self) -> tuple[Part, Part]:
        """Return the embedded images for training and testing."""
        return _EMBEDDED[self.sources[self.source].embedded]()

    def augmented(self, train: Any, *, seed: int, epoch: int) -> Samples:
        """Return training images that are shifted, and mirrored where the data set allows, unless switched off."""
        changed: Samples = train.augmented(seed, epoch) if self.augment else train
        return changed

    def model(self) -> nn.Module:
        """Build a network from [B, C, H, W] to logits [B, classes]."""
        (example, _) = self.datasets()[0][:1]
        return NETWORKS[self.architecture](example.shape[1], example.shape[-1], self._classes)

    @property
    def _classes(self) -> int:
        assert self.image_classes is not None
        return self.image_classes

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats."""
        return functional.cross_entropy(outputs, targets, label_smoothing=self.label_smoothing)

    def evaluator(self) -> Evaluator:
        """Return a metric of the accuracy."""
        return accuracy(self._classes)
