"""Classes of images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from natgrad.errors import require
from natgrad.tasks.applications.base import Application, Architecture, FileApplication, Source
from natgrad.tasks.facts import CHARACTERS, DIGITS, Metric


@dataclass(frozen=True, kw_only=True)
class ImageSource(Source):
    """A data set of images of classes.

    Attributes:
        classes: The number of classes.
        mean: The mean of each channel of the training images in [0, 1].
        deviation: Their standard deviation.
        padding: Pixels of black around a training image before a part of its size is cut out at random.
        flip: Whether half of the training images are mirrored.
    """

    classes: int
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    padding: int = 0
    flip: bool = False


_CIFAR = "binary or Python batches"
_IDX = "idx files, with or without gzip"


@dataclass(frozen=True, kw_only=True)
class Classification(Application):
    """Classes of small images.

    Attributes:
        augment: Whether training images are shifted, and mirrored where the data set allows.
    """

    title: ClassVar[str] = "Classes of small images"
    # ResNet: 64,000 steps of 128 images (He et al. 2016); DenseNet and 3C1F as in HyLo (Mu et al. 2022).
    models: ClassVar[Mapping[str, Architecture]] = {
        "3c1f": Architecture(title="three convolutions and a linear layer", epochs=60),
        "densenet": Architecture(title="DenseNet-BC, depth 100, growth 12", epochs=60),
        **{f"resnet{depth}": Architecture(title=f"ResNet-{depth}", epochs=164) for depth in (20, 32, 56, 110)},
        "vgg16": Architecture(title="VGG-16 with batch norm", epochs=164),
    }
    sources: ClassVar[Mapping[str, ImageSource]] = {
        "cifar10": ImageSource(
            title="CIFAR-10",
            classes=10,
            layout=_CIFAR,
            embedded="glyphs",
            mean=(0.4914, 0.4822, 0.4465),
            deviation=(0.2470, 0.2435, 0.2616),
            padding=4,
            flip=True,
        ),
        "cifar100": ImageSource(
            title="CIFAR-100",
            classes=100,
            layout=_CIFAR,
            embedded="glyphs",
            mean=(0.5071, 0.4865, 0.4409),
            deviation=(0.2673, 0.2564, 0.2762),
            padding=4,
            flip=True,
        ),
        "mnist": ImageSource(
            title="MNIST", classes=10, layout=_IDX, embedded="digits", mean=(0.1307,), deviation=(0.3081,)
        ),
        "fashion-mnist": ImageSource(
            title="Fashion-MNIST",
            classes=10,
            layout=_IDX,
            embedded="digits",
            mean=(0.2860,),
            deviation=(0.3530,),
            padding=4,
            flip=True,
        ),
    }
    # Mirrored characters are other characters.
    embedded: ClassVar[Mapping[str, ImageSource]] = {
        "glyphs": ImageSource(title="embedded glyphs", classes=len(CHARACTERS), padding=4, epochs=5),
        "digits": ImageSource(title="embedded digits", classes=DIGITS, epochs=20),
    }
    likelihood: ClassVar[Literal["categorical"]] = "categorical"
    metric: ClassVar[Metric] = Metric(name="accuracy", better="higher")
    batch_size: ClassVar[int] = 128

    augment: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.augment, bool), "augment", self.augment, "True or False")

    @property
    def data_set(self) -> ImageSource:
        """The data set that the task reads: `source`, or the embedded data."""
        found = super().data_set
        assert isinstance(found, ImageSource)
        return found

    @property
    def image_classes(self) -> int | None:
        """The number of classes."""
        return self.data_set.classes

    @property
    def least_samples(self) -> int:
        """Two, where batch normalisation sees one pixel of each image."""
        return 2 if self.architecture == "vgg16" else 1


@dataclass(frozen=True, kw_only=True)
class ImageNet(Classification, FileApplication):
    """Classes of photographs.

    Attributes:
        augment: Whether training pictures are cut out and mirrored at random.
        readers: Processes of each rank that read pictures ahead; None: up to 8, by the number of CPUs.
    """

    title: ClassVar[str] = "Classes of photographs"
    # The training of torchvision's reference scripts.
    models: ClassVar[Mapping[str, Architecture]] = {
        f"resnet{depth}": Architecture(title=f"ResNet-{depth} of torchvision", epochs=90) for depth in (18, 50)
    }
    sources: ClassVar[Mapping[str, ImageSource]] = {
        "imagenet": ImageSource(
            title="ImageNet",
            classes=1000,
            layout="train/CLASS/PICTURE and val/CLASS/PICTURE",
            embedded="glyphs",
            mean=(0.485, 0.456, 0.406),
            deviation=(0.229, 0.224, 0.225),
            flip=True,
        )
    }
    batch_size: ClassVar[int] = 256

    @property
    def image_classes(self) -> int | None:
        """The number of folders in `train`."""
        train = Path(self.data or "", "train")
        if self.data is None or not train.is_dir():
            return super().image_classes
        return sum(place.is_dir() for place in train.iterdir())
