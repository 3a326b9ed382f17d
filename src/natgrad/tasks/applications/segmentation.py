"""A class for each pixel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from natgrad.errors import require
from natgrad.tasks.applications.base import Architecture, FileApplication, Source
from natgrad.tasks.facts import DIGITS, Metric

MULTIPLE = 16  # of which the sides of pictures are: U-Net halves them four times
IGNORED = 255  # the class of pixels that do not count
_SIDES = (32, 2048)
_LARGEST_SCENE = 160


@dataclass(frozen=True, kw_only=True)
class SegmentationSource(Source):
    """A data set of pictures with a class for each pixel.

    Attributes:
        classes: The number of classes; of two, the second is the foreground.
        side: Pixels of a side of training pictures.
        batch_size: Default global batch size.
        evaluation_batch: Pictures that the model is evaluated on at once.
        scales: The least and the largest size of what a training picture shows.
        degrees: The largest angle that a training picture is turned by, either way.
        outside: The class of what is outside a picture.
    """

    classes: int
    side: int
    batch_size: int = 16
    evaluation_batch: int = 16
    scales: tuple[float, float] = (1.0, 1.0)
    degrees: float = 0.0
    outside: int = 0


@dataclass(frozen=True, kw_only=True)
class Segmentation(FileApplication):
    """A class for each pixel of a picture.

    Attributes:
        augment: Whether training pictures from a folder are scaled, cut out, turned and mirrored at random.
        side: Pixels of a side of these pictures, and of embedded scenes; None: the data set's.
        sync_norm: Whether batch norm layers use the mean and variance of all ranks, with DASO those of a node's ranks.
        readers: Processes of each rank that read pictures ahead; None: up to 8, by the number of CPUs.
    """

    title: ClassVar[str] = "A class for each pixel"
    # As long as the first-order runs of HyLo (Mu et al. 2022) and those of DASO (Coquelin et al. 2021).
    models: ClassVar[Mapping[str, Architecture]] = {
        "multiscale": Architecture(title="hierarchical multi-scale attention over ResNet-50", epochs=175),
        "unet": Architecture(title="U-Net", epochs=50),
    }
    sources: ClassVar[Mapping[str, SegmentationSource]] = {
        "lgg": SegmentationSource(
            title="LGG MRI",
            layout="kaggle_3m/PATIENT/*.tif and *_mask.tif",
            embedded="binary-scenes",
            classes=2,
            side=256,
            scales=(0.95, 1.05),
            degrees=15,
        ),
        "cityscapes": SegmentationSource(
            title="Cityscapes",
            layout="leftImg8bit/PART/CITY/*.png and gtFine/PART/CITY/*_labelIds.png, PART train and val",
            embedded="scenes",
            classes=19,
            side=512,
            batch_size=8,
            evaluation_batch=1,
            scales=(0.5, 2.0),
            outside=IGNORED,
        ),
    }
    embedded: ClassVar[Mapping[str, SegmentationSource]] = {
        "binary-scenes": SegmentationSource(title="embedded scenes, digits or not", classes=2, side=96, epochs=10),
        "scenes": SegmentationSource(title="embedded scenes", classes=1 + DIGITS, side=96, epochs=20),
    }

    augment: bool = True
    side: int | None = None
    sync_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("augment", "sync_norm"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        if self.side is not None:
            least, most = _SIDES if self.data is not None else (_SIDES[0], _LARGEST_SCENE)
            fits = type(self.side) is int and least <= self.side <= most and self.side % MULTIPLE == 0
            require(fits, "side", self.side, f"a multiple of {MULTIPLE} from {least} to {most}")

    @property
    def data_set(self) -> SegmentationSource:
        """The data set that the task reads: `source`, or the embedded data."""
        found = super().data_set
        assert isinstance(found, SegmentationSource)
        return found

    @property
    def is_binary(self) -> bool:
        """Whether there are a background and a foreground, which one logit tells apart."""
        return self.data_set.classes == 2

    @property
    def likelihood(self) -> Literal["categorical", "bernoulli"]:
        """The likelihood of the logits of a pixel."""
        return "bernoulli" if self.is_binary else "categorical"

    @property
    def reduction(self) -> Literal["mean", "tokens"]:
        """Each picture of LGG is a sample, as in HyLo; each pixel of Cityscapes that counts is one."""
        return "mean" if self.is_binary else "tokens"

    @property
    def kfac_form(self) -> Literal["inverse"] | None:
        """The models have factors of sides up to 4608, whose eigenvectors cost ten times as much as inverses."""
        return "inverse"

    @property
    def metric(self) -> Metric:
        """Dice's coefficient of the foreground, or the mean over classes of intersection over union."""
        return Metric(name="Dice" if self.is_binary else "mIoU", better="higher")

    @property
    def batch_size(self) -> int:
        """Default global batch size."""
        return self.data_set.batch_size

    @property
    def evaluation_batch(self) -> int:
        """Pictures that the model is evaluated on at once."""
        return self.data_set.evaluation_batch
