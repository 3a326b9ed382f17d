"""Classes of photographs: ImageNet from folders of classes or tar shards, or embedded characters. Needs torchvision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from natgrad.tasks import applications
from natgrad.tasks.base import Samples
from natgrad.tasks.classification import Classification, Part, embedded_glyphs
from natgrad.tasks.layouts import imagenet
from natgrad.tasks.pictures import Pictures
from natgrad.tasks.unreadable import Unreadable
from natgrad.tasks.vision import torchvision

_MIDDLE = 0.875  # the side of a test picture, as a share of the shorter side to which the whole picture is resized
_GLYPHS, _GLYPH_SIDE = 1024, 64  # the number of embedded pictures for training, and their pixels before enlargement
_SECOND_HEAD = 0.4  # the weight of the loss of Inception's second head, as in torchvision's tutorials


@dataclass(frozen=True, kw_only=True)
class ImageNet(applications.ImageNet, Classification):
    """The data, model and loss of the task."""

    @property
    def side(self) -> int:
        """The pixels of a side of a picture."""
        model = self.models[self.architecture]
        return model.embedded_side if self.data is None else model.side

    def load(self) -> tuple[Samples, Samples]:
        """Return pictures, normalised by ImageNet's mean and deviation, with their class."""
        side = self.side
        if self.data is None:
            images: list[Any] = [*super().load()]
            train, test = (replace(part, side=None if side == _GLYPH_SIDE else side) for part in images)
            return train, test
        transforms = torchvision("transforms")
        middle = transforms.Compose([transforms.Resize(round(side / _MIDDLE)), transforms.CenterCrop(side)])
        cut = transforms.Compose([transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip()])
        found = [
            Pictures(
                pictures=pictures,
                mean=self.data_set.mean,
                deviation=self.data_set.deviation,
                view=middle,
                random_view=cut,
                unreadable=Unreadable(len(pictures)),
            )
            for pictures in imagenet.read(Path(self.data), self.data_set.classes)
        ]
        return found[0], found[1]

    def embedded_images(self) -> tuple[Part, Part]:
        """Return the embedded images for training and testing."""
        return embedded_glyphs(_GLYPHS, _GLYPH_SIDE)

    def unreadable(self) -> list[str]:
        """Return the pictures that could not be read."""
        if self.data is None:
            return []
        parts: Any = self.datasets()
        return [str(part.pictures[index]) for part in parts for index in part.unreadable.indices()]

    def model(self) -> nn.Module:
        """Build a network from [B, 3, H, W] to logits [B, classes]; Inception's are of two heads in training."""
        models = torchvision("models")
        if self.architecture == "inception":
            model: nn.Module = models.inception_v3(num_classes=self.image_classes, init_weights=True)
        else:
            model = models.get_model(self.architecture, num_classes=self.image_classes)
        return model

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats, with Inception's second head in training."""
        if isinstance(outputs, Tensor):
            return super().loss(outputs, targets)
        smoothing = self.label_smoothing
        first, second = (functional.cross_entropy(each, targets, label_smoothing=smoothing) for each in outputs)
        return first + _SECOND_HEAD * second
