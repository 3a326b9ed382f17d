"""Objects in pictures: their boxes, classes and masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from natgrad.errors import require
from natgrad.tasks.applications.base import Architecture, FileApplication, Source
from natgrad.tasks.facts import Metric, Reduction


@dataclass(frozen=True, kw_only=True)
class Detection(FileApplication):
    """Boxes, classes and masks of objects.

    Attributes:
        augment: Whether half of the training pictures are mirrored where the data set allows.
        measure: "bbox" or "segm", whether the metric compares boxes or masks.
        backbone: A file with the weights of torchvision's ResNet-50, whose batch norm and first layers are then not
            trained; None: all weights are drawn at random. Not for embedded data, which have a smaller model.
        readers: Processes of each rank that read pictures ahead; None: up to 8, by the number of CPUs.
    """

    title: ClassVar[str] = "Objects in pictures"
    # The training of torchvision's reference scripts.
    models: ClassVar[Mapping[str, Architecture]] = {
        "maskrcnn": Architecture(title="Mask R-CNN of torchvision, ResNet-50 with FPN", epochs=26)
    }
    sources: ClassVar[Mapping[str, Source]] = {
        "coco": Source(
            title="COCO",
            layout="annotations/instances_train2017.json, train2017/PICTURE, and the same of val2017",
            embedded="scenes",
        )
    }
    embedded: ClassVar[Mapping[str, Source]] = {"scenes": Source(title="embedded scenes", epochs=20)}
    # The loss of the box head is a mean over proposals, that of the mask head over proposals and pixels.
    reduction: ClassVar[Mapping[str, Reduction]] = {
        "*roi_heads.box_*": "tokens",
        "*roi_heads.mask_head.*": "tokens",
        "*roi_heads.mask_predictor.*": "tokens",
    }
    # Pauloski et al. 2022, 6.3.2.
    curvature_layers: ClassVar[tuple[str, ...]] = tuple(reduction)
    outputs: ClassVar[tuple[str, ...]] = (
        "network.rpn.head.cls_logits",
        "network.rpn.head.bbox_pred",
        "network.roi_heads.box_predictor.cls_score",
        "network.roi_heads.box_predictor.bbox_pred",
        "network.roi_heads.mask_predictor.mask_fcn_logits",
    )
    likelihood: ClassVar[None] = None
    batch_size: ClassVar[int] = 16
    evaluation_batch: ClassVar[int] = 4

    augment: bool = True
    measure: str = "bbox"
    backbone: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.augment, bool), "augment", self.augment, "True or False")
        require(self.measure in ("bbox", "segm"), "measure", self.measure, "bbox or segm")
        fits = self.backbone is None or (isinstance(self.backbone, str) and self.data is not None)
        require(fits, "backbone", self.backbone, "the path of a file, given with data")

    @property
    def metric(self) -> Metric:
        """The mean average precision of boxes or masks."""
        return Metric(name=f"{self.measure} mAP", better="higher")
