"""Classes of photographs: ImageNet from folders of classes, or embedded characters. Needs torchvision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from natgrad.errors import NatgradError, require
from natgrad.tasks import applications
from natgrad.tasks.base import DataError, Samples
from natgrad.tasks.classification import Classification
from natgrad.tasks.images import normalise

SIDE, LARGER_SIDE = 224, 256  # pixels of a picture, and of the shorter side of a test picture before it is cut


def torchvision(module: str) -> Any:
    """Return a module of torchvision.

    Raises:
        NatgradError: torchvision is not installed, or not for this torch.
    """
    try:
        return import_module(f"torchvision.{module}")
    except (ImportError, RuntimeError, OSError) as error:  # the last two if it was built for another torch
        raise NatgradError(
            f"this task needs torchvision, as installed by: pip install 'natgrad[vision]' ({error})"
        ) from error


@dataclass(frozen=True, kw_only=True, eq=False)
class Pictures:
    """Labelled pictures in files, decoded when they are needed.

    Attributes:
        files: The paths and the classes of the pictures.
        mean: The mean of each channel in [0, 1], which is subtracted.
        deviation: The deviation of each channel, which the difference is divided by.
        view: Makes a picture of 224 x 224 pixels of one of any size.
        random_view: The same for training, with random numbers of torch's global generator.
        draw: The seed and epoch of the augmentation; None: `view`.
    """

    files: Sequence[tuple[str, int]]
    mean: Sequence[float]
    deviation: Sequence[float]
    view: Callable[[Image.Image], Image.Image]
    random_view: Callable[[Image.Image], Image.Image]
    draw: tuple[int, int] | None = None

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.files)

    def __getitem__(self, indices: list[int] | slice) -> tuple[Tensor, Tensor]:
        """Return normalised pictures [B, 3, 224, 224] and labels [B].

        Raises:
            DataError: A picture cannot be read.
        """
        chosen = range(len(self))[indices] if isinstance(indices, slice) else indices
        pixels = torch.stack([self._read(index) for index in chosen])
        labels = torch.tensor([self.files[index][1] for index in chosen])
        return normalise(pixels, self.mean, self.deviation), labels

    def augmented(self, seed: int, epoch: int) -> Pictures:
        """Return the pictures of an epoch. Their augmentation follows from seed, epoch and sample alone."""
        return replace(self, draw=(seed, epoch))

    def _read(self, index: int) -> Tensor:
        path = self.files[index][0]
        try:
            with Image.open(path) as image:
                picture = image.convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{path} is no picture that can be read: {error}") from error
        if self.draw is None:
            picture = self.view(picture)
        else:
            with torch.random.fork_rng(devices=[]):
                (seed,) = np.random.SeedSequence((*self.draw, index)).generate_state(1, np.uint64)
                torch.default_generator.manual_seed(int(seed >> np.uint64(1)))
                picture = self.random_view(picture)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def read(folder: Path) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return the paths of the pictures in `train` and `val`, and the indices of their classes in the order of names.

    Raises:
        ValueError: There is no such folder.
        DataError: A folder is missing or has no pictures, or the classes of both differ.
    """
    require(folder.is_dir(), "data", str(folder), "an existing folder")
    found = {}
    for part in ("train", "val"):
        place = folder / part
        if not place.is_dir():
            raise DataError(f"{place} is missing: ImageNet has train/CLASS/PICTURE and val/CLASS/PICTURE")
        if not any(child.is_dir() for child in place.iterdir()):
            raise DataError(f"{place} has no folders: its pictures belong into one folder for each class")
        try:
            found[part] = torchvision("datasets").ImageFolder(str(place))
        except FileNotFoundError as error:
            raise DataError(f"{place}: {error}") from error
    train, val = found["train"], found["val"]
    differing = sorted({*train.classes} ^ {*val.classes})
    if differing:
        where = "train" if differing[0] in train.classes else "val"
        raise DataError(
            f"{folder}: class {differing[0]} is in {where} alone; train has {len(train.classes)} classes, and val "
            f"{len(val.classes)}"
        )
    return train.samples, val.samples


@dataclass(frozen=True, kw_only=True)
class ImageNet(applications.ImageNet, Classification):
    """The data, model and loss of the task."""

    def load(self) -> tuple[Samples, Samples]:
        """Return pictures, normalised by ImageNet's mean and deviation, with their class."""
        if self.data is None:
            return super().load()
        train, val = read(Path(self.data))
        transforms = torchvision("transforms")
        views = {
            "mean": self.data_set.mean,
            "deviation": self.data_set.deviation,
            "view": transforms.Compose([transforms.Resize(LARGER_SIDE), transforms.CenterCrop(SIDE)]),
            "random_view": transforms.Compose([transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip()]),
        }
        return Pictures(files=train, **views), Pictures(files=val, **views)

    def model(self) -> nn.Module:
        """Build a network from [B, 3, H, W] to logits [B, classes]."""
        model: nn.Module = getattr(torchvision("models"), self.architecture)(num_classes=self.image_classes)
        return model
