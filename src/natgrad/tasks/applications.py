"""The applications of the papers: models and data sets by name, without torch, so that `natgrad tasks` is fast.

The name of such a task is MODEL-DATA. Its data are read from a folder in the data set's usual layout, or without a
folder are embedded data of the same kind.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from typing_extensions import Self

from natgrad.errors import require
from natgrad.tasks.facts import CHARACTERS, DIGITS, Facts, Metric


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model.

    Attributes:
        title: The model in a few words.
        epochs: The length of a run on data from a folder.
    """

    title: str
    epochs: int


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set of images of classes.

    Attributes:
        title: The name of the data set.
        classes: The number of classes.
        layout: The files in its folder, in a few words.
        embedded: The embedded data of the same kind.
        mean: The mean of each channel of the training images in [0, 1].
        deviation: Their standard deviation.
        padding: Pixels of black around a training image before a part of its size is cut out at random.
        flip: Whether half of the training images are mirrored.
    """

    title: str
    classes: int
    layout: str = ""
    embedded: str = ""
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    padding: int = 0
    flip: bool = False


@dataclass(frozen=True, kw_only=True)
class Application(Facts):
    """A model of `models` on a data set of `sources`.

    Attributes:
        title: What is learned.
        models: The models by name.
        sources: The data sets by name.
        architecture: The name of the model.
        source: The name of the data set.
        data: The folder of the data set; None: embedded data of the same kind.
    """

    title: ClassVar[str]
    models: ClassVar[Mapping[str, Architecture]]
    sources: ClassVar[Mapping[str, Source]]
    fixed: ClassVar[tuple[str, ...]] = ("architecture", "source")

    architecture: str
    source: str
    data: str | None = None

    def __post_init__(self) -> None:
        fits = self.data is None or (isinstance(self.data, str) and self.data)
        require(fits, "data", self.data, f"the path (a string) of a folder with {self.sources[self.source].title}")

    @classmethod
    def all(cls) -> list[Self]:
        """Return every model on every data set."""
        return [cls(architecture=model, source=source) for model in cls.models for source in cls.sources]

    @property
    def name(self) -> str:
        """MODEL-DATA."""
        return f"{self.architecture}-{self.source}"

    @property
    @abstractmethod
    def images(self) -> Source:
        """The data set that the task reads: `source`, or the embedded data."""

    @property
    def summary(self) -> str:
        """Data and model in one line."""
        return f"{self.images.title}, {self.models[self.architecture].title}"


# The embedded data. Mirrored characters are other characters.
EMBEDDED = {
    "glyphs": Source(title="embedded glyphs", classes=len(CHARACTERS), padding=4),
    "digits": Source(title="embedded digits", classes=DIGITS),
}
EMBEDDED_EPOCHS = {"glyphs": 5, "digits": 20}

_MOST_READERS = 64  # of a rank

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
    sources: ClassVar[Mapping[str, Source]] = {
        "cifar10": Source(
            title="CIFAR-10",
            classes=10,
            layout=_CIFAR,
            embedded="glyphs",
            mean=(0.4914, 0.4822, 0.4465),
            deviation=(0.2470, 0.2435, 0.2616),
            padding=4,
            flip=True,
        ),
        "cifar100": Source(
            title="CIFAR-100",
            classes=100,
            layout=_CIFAR,
            embedded="glyphs",
            mean=(0.5071, 0.4865, 0.4409),
            deviation=(0.2673, 0.2564, 0.2762),
            padding=4,
            flip=True,
        ),
        "mnist": Source(title="MNIST", classes=10, layout=_IDX, embedded="digits", mean=(0.1307,), deviation=(0.3081,)),
        "fashion-mnist": Source(
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
    likelihood: ClassVar[Literal["categorical"]] = "categorical"
    metric: ClassVar[Metric] = Metric(name="accuracy", better="higher")
    batch_size: ClassVar[int] = 128

    augment: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.augment, bool), "augment", self.augment, "True or False")

    @property
    def images(self) -> Source:
        """The data set that the task reads: `source`, or the embedded data."""
        source = self.sources[self.source]
        return source if self.data is not None else EMBEDDED[source.embedded]

    @property
    def image_classes(self) -> int | None:
        """The number of classes."""
        return self.images.classes

    @property
    def least_samples(self) -> int:
        """Two, where batch normalisation sees one pixel of each image."""
        return 2 if self.architecture == "vgg16" else 1

    @property
    def epochs(self) -> int:
        """The paper's length of a run, or a short one on embedded data."""
        if self.data is not None:
            return self.models[self.architecture].epochs
        return EMBEDDED_EPOCHS[self.sources[self.source].embedded]


@dataclass(frozen=True, kw_only=True)
class ImageNet(Classification):
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
    sources: ClassVar[Mapping[str, Source]] = {
        "imagenet": Source(
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

    readers: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.readers is not None:
            fits = type(self.readers) is int and 0 <= self.readers <= _MOST_READERS
            require(fits, "readers", self.readers, f"a whole number from 0 to {_MOST_READERS}")

    @property
    def image_classes(self) -> int | None:
        """The number of folders in `train`."""
        train = Path(self.data or "", "train")
        if self.data is None or not train.is_dir():
            return super().image_classes
        return sum(place.is_dir() for place in train.iterdir())


APPLICATIONS: tuple[type[Application], ...] = (Classification, ImageNet)
"""The applications, each with all its models on all its data sets."""
