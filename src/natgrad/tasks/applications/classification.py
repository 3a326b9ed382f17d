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
        label_smoothing: The share of each label in the training loss that is spread over all classes.
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
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.augment, bool), "augment", self.augment, "True or False")
        smoothing = self.label_smoothing
        fits = isinstance(smoothing, int | float) and not isinstance(smoothing, bool) and 0 <= smoothing < 1
        require(fits, "label_smoothing", smoothing, "a share in [0, 1)")

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
    def kfac_form(self) -> Literal["inverse"] | None:
        """Inverse for VGG-16: factors have sides of up to 4609, for which eigenvectors cost ten times as much."""
        return "inverse" if self.architecture == "vgg16" else None

    @property
    def least_samples(self) -> int:
        """Two, where batch normalisation sees one pixel of each image."""
        return 2 if self.architecture == "vgg16" else 1


@dataclass(frozen=True, kw_only=True)
class PhotographModel(Architecture):
    """A model of photographs.

    Attributes:
        side: The pixels of a side of a picture from a folder.
        embedded_side: The same of an embedded one.
    """

    side: int = 224
    embedded_side: int = 64


@dataclass(frozen=True, kw_only=True)
class ImageNet(Classification, FileApplication):
    """Classes of photographs.

    Attributes:
        augment: Whether training pictures are cut out and mirrored at random.
        label_smoothing: The share of each label in the training loss that is spread over all classes.
        readers: Processes of each rank that read pictures ahead; None: up to 8, by the number of CPUs.
    """

    title: ClassVar[str] = "Classes of photographs"
    # The training of torchvision's reference scripts. Inception's second head needs pictures of its full size.
    models: ClassVar[Mapping[str, PhotographModel]] = {
        "densenet201": PhotographModel(title="DenseNet-201 of torchvision", epochs=90),
        "inception": PhotographModel(
            title="Inception v3 of torchvision, 299 pixels", epochs=90, side=299, embedded_side=299
        ),
        **{
            f"resnet{depth}": PhotographModel(title=f"ResNet-{depth} of torchvision", epochs=90)
            for depth in (18, 34, 50, 101, 152)
        },
    }
    sources: ClassVar[Mapping[str, ImageSource]] = {
        "imagenet": ImageSource(
            title="ImageNet",
            classes=1000,
            layout="train/CLASS/PICTURE and val/CLASS/PICTURE, or tar shards",
            embedded="glyphs",
            mean=(0.485, 0.456, 0.406),
            deviation=(0.229, 0.224, 0.225),
            flip=True,
        )
    }
    embedded: ClassVar[Mapping[str, ImageSource]] = {
        "glyphs": ImageSource(title="embedded glyphs", classes=len(CHARACTERS), padding=8, epochs=10)
    }
    batch_size: ClassVar[int] = 256

    @property
    def likelihood(self) -> Literal["categorical"] | None:  # type: ignore[override]  # of one model there is none
        """Categorical; None for Inception, whose loss has a second term."""
        return None if self.architecture == "inception" else "categorical"

    @property
    def kfac_form(self) -> Literal["inverse"] | None:
        """Inverse: factors have sides of up to 4608, for which eigenvectors cost ten times as much."""
        return "inverse"

    @property
    def evaluation_batch(self) -> int:
        """Pictures that the model is evaluated on at once."""
        return 64

    @property
    def least_samples(self) -> int:
        """Two, where batch normalisation sees one pixel of each image."""
        return 2 if self.architecture == "inception" else 1

    @property
    def image_classes(self) -> int | None:
        """The number of folders in `train`; with shards that of ImageNet."""
        train = Path(self.data or "", "train")
        folders = sum(place.is_dir() for place in train.iterdir()) if self.data and train.is_dir() else 0
        return folders or super().image_classes


@dataclass(frozen=True, kw_only=True)
class Timm(ImageNet):
    """Classes of photographs, by any model of timm.

    Attributes:
        network: The name of the model in timm.
    """

    title: ClassVar[str] = "Classes of photographs, by a model of timm"
    models: ClassVar[Mapping[str, PhotographModel]] = {
        "timm": PhotographModel(title="the model of timm with the name `network`", epochs=300)
    }

    network: str = "vit_tiny_patch16_224"

    @property
    def summary(self) -> str:
        """Data and model in one line."""
        return f"{self.data_set.title}, {self.network} of timm"
