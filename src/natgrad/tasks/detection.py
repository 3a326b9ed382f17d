"""Objects in pictures: Mask R-CNN on COCO from a folder, or on embedded scenes. Needs torchvision and pycocotools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from natgrad.errors import require
from natgrad.tasks import applications
from natgrad.tasks.base import DataError, Evaluator, Samples, Task
from natgrad.tasks.layouts import coco
from natgrad.tasks.pictures import read
from natgrad.tasks.scenes import CLASSES, Scenes, scenes
from natgrad.tasks.unreadable import Unreadable
from natgrad.tasks.vision import pycocotools, torchvision

# The embedded scenes; a quarter as many for testing.
_SCENES, _SIDE = 512, 96

Objects = dict[str, Tensor]
"""The n objects of a picture: boxes [n, 4], labels [n], masks [n, H, W], and whether each is a crowd, iscrowd [n]."""

Batch = tuple[tuple[list[Tensor], list[Objects]], list[Objects]]
"""Pictures, uint8 [3, H, W] each, with their objects, and the objects again, as the model takes both in training."""


class Source(Protocol):
    """Pictures with objects."""

    def __len__(self) -> int:
        """Return the number of pictures."""

    def picture(self, index: int) -> tuple[Tensor, Objects]:
        """Return a picture and its objects."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """Pictures that were drawn.

    Attributes:
        scenes: The scenes.
    """

    scenes: Scenes

    def __len__(self) -> int:
        """Return the number of scenes."""
        return len(self.scenes)

    def picture(self, index: int) -> tuple[Tensor, Objects]:
        """Return a scene and its objects."""
        objects = self.scenes.instances(index)
        return self.scenes.pictures[index], {**objects, "iscrowd": torch.zeros_like(objects["labels"])}


@dataclass(frozen=True, eq=False)
class Photographs:
    """Pictures in files.

    Attributes:
        pictures: The files and their objects.
    """

    pictures: Sequence[coco.Picture]

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.pictures)

    def picture(self, index: int) -> tuple[Tensor, Objects]:
        """Return a picture and its objects.

        Raises:
            DataError: The picture or an outline cannot be read, or the picture has another size than in its annotation.
        """
        described = self.pictures[index]
        pixels = torch.from_numpy(np.array(read(described.path, "RGB"))).permute(2, 0, 1)
        size = f"{described.height} x {described.width}"
        if pixels.shape[1:] != (described.height, described.width):
            raise DataError(
                f"{described.path} has {pixels.shape[1]} x {pixels.shape[2]} pixels, and {size} in its annotation"
            )
        boxes = [instance.box for instance in described.instances]
        return pixels, {
            "boxes": torch.tensor(boxes, dtype=torch.float32).view(-1, 4),
            "labels": torch.tensor([instance.label for instance in described.instances], dtype=torch.int64),
            "masks": torch.from_numpy(coco.masks(described)),
            "iscrowd": torch.tensor([instance.is_crowd for instance in described.instances], dtype=torch.int64),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Pictures:
    """Pictures with objects, in batches. The next one that can be read takes the place of one that cannot.

    Attributes:
        source: The pictures.
        unreadable: The pictures that could not be read.
        classes: The number of classes, with the background.
        has_crowds: Whether groups of objects are among the objects, as for an evaluation.
        flip: Whether half of the pictures are mirrored if they are augmented.
        draw: The seed and epoch of the augmentation; None: no augmentation.
    """

    source: Source
    unreadable: Unreadable
    classes: int
    has_crowds: bool
    flip: bool = False
    draw: tuple[int, int] | None = None

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.source)

    def __getitem__(self, indices: list[int] | slice) -> Batch:
        """Return a batch of pictures.

        Raises:
            DataError: A hundred pictures in a row cannot be read.
        """
        chosen = range(len(self))[indices] if isinstance(indices, slice) else indices
        read = [self.unreadable.substitute(self._read, index) for index in chosen]
        pictures, objects = (list(part) for part in zip(*read, strict=True))
        return (pictures, objects), objects

    def augmented(self, seed: int, epoch: int) -> Pictures:
        """Return the pictures of an epoch. Their augmentation follows from seed, epoch and sample alone."""
        return replace(self, draw=(seed, epoch))

    def _read(self, index: int) -> tuple[Tensor, Objects]:
        picture, objects = self.source.picture(index)
        if not self.has_crowds:
            single = objects["iscrowd"] == 0
            objects = {name: each[single] for name, each in objects.items()}
        if self.flip and self.draw is not None and np.random.default_rng((*self.draw, index)).random() < 0.5:
            left, top, right, bottom = objects["boxes"].unbind(1)
            width = picture.shape[2]
            boxes = torch.stack((width - right, top, width - left, bottom), dim=1)
            picture, objects = picture.flip(2), {**objects, "boxes": boxes, "masks": objects["masks"].flip(2)}
        return picture, objects


class Detector(nn.Module):
    """One of torchvision's detection models, called with one argument.

    Args:
        network: The model.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._rows: dict[str, float] = {}
        # By the patterns of `applications.Detection.reduction`: the layer of each whose positions its term averages.
        heads: Any = network.roi_heads
        for name, layer in (
            ("*roi_heads.box_*", heads.box_predictor.cls_score),
            ("*roi_heads.mask_head.*", heads.mask_head),
            ("*roi_heads.mask_predictor.*", heads.mask_predictor),
        ):
            layer.register_forward_hook(self._counter(name))

    def _counter(self, name: str) -> Any:
        def count(layer: nn.Module, inputs: object, output: Tensor) -> None:
            self._rows[name] = output.numel() // output.shape[1]

        return count

    def forward(self, inputs: tuple[list[Tensor], list[Objects]]) -> Any:
        """Return the losses and numbers of rows in training, else the objects that are found in each picture."""
        pictures, objects = inputs
        dtype = next(self.network.parameters()).dtype
        scaled = [picture.to(dtype) / 255 for picture in pictures]
        if not self.training:
            return [{**found, "masks": found["masks"][:, 0] > 0.5} for found in self.network(scaled)]
        losses = self.network(scaled, [{name: each[name] for name in ("boxes", "labels", "masks")} for each in objects])
        return {"losses": losses, "rows": dict(self._rows)}


class MeanPrecision:
    """COCO's mean average precision, over the pictures of all ranks.

    Args:
        measure: "bbox" or "segm".
    """

    def __init__(self, measure: str) -> None:
        self._measure = measure
        self.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch of found objects and of those there are."""
        self._metric.update(outputs, targets)

    def compute(self) -> Tensor:
        """Return the mean average precision; -1 if there are no objects."""
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return self._value(self._metric)
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, self._metric.metric_state)  # lists of different lengths
        whole = copy(self._metric)
        for name in states[0]:
            setattr(whole, name, list(chain.from_iterable(state[name] for state in states)))
        return self._value(whole)

    def reset(self) -> None:
        """Forget all batches."""
        torchvision("ops")  # without it torchmetrics lacks the class
        kind: Any = import_module("torchmetrics.detection").MeanAveragePrecision
        self._metric = kind(iou_type=self._measure, backend="pycocotools", sync_on_compute=False)

    @staticmethod
    def _value(metric: Any) -> Tensor:
        value: Tensor = metric.compute()["map"]
        return value


@dataclass(frozen=True, kw_only=True)
class Detection(applications.Detection, Task):
    """The data, model and loss of the task."""

    def load(self) -> tuple[Samples, Samples]:
        """Return pictures with their objects; crowds are in the test set only."""
        pycocotools()  # the metric needs it too
        train: Source
        test: Source
        if self.data is None:
            train, test = map(Drawn, scenes(_SCENES, side=_SIDE))
            classes = CLASSES
        else:
            found = coco.read(Path(self.data))
            train, test = (Photographs(part.pictures) for part in found)
            classes = 1 + len(found[0].categories)
        return (
            Pictures(
                source=train,
                unreadable=Unreadable(len(train)),
                classes=classes,
                has_crowds=False,
                flip=self.data is not None,  # mirrored characters are other characters
            ),
            Pictures(source=test, unreadable=Unreadable(len(test)), classes=classes, has_crowds=True),
        )

    def unreadable(self) -> list[str]:
        """Return the pictures that could not be read."""
        if self.data is None:
            return []
        parts: Any = self.datasets()
        return [str(part.source.pictures[index].path) for part in parts for index in part.unreadable.indices()]

    def augmented(self, train: Any, *, seed: int, epoch: int) -> Samples:
        """Return training pictures of which half are mirrored, where the data set allows, unless switched off."""
        changed: Samples = train.augmented(seed, epoch) if self.augment else train
        return changed

    def model(self) -> nn.Module:
        """Build Mask R-CNN, or a small one for scenes."""
        train: Any = self.datasets()[0]
        return Detector(_small(train.classes) if self.data is None else _mask_rcnn(train.classes, self.backbone))

    def loss(self, outputs: Mapping[str, Mapping[str, Tensor]], targets: Sequence[Objects]) -> Tensor:
        """Return the sum of the losses of proposals, their boxes, and the objects' classes, boxes and masks."""
        return torch.stack(list(outputs["losses"].values())).sum()

    def count_outputs(self, outputs: Mapping[str, Mapping[str, float]]) -> Mapping[str, float]:
        """Return the number of proposals, and of positions in the masks of those that are objects."""
        return outputs["rows"]

    def evaluator(self) -> Evaluator:
        """Return a metric of the mean average precision."""
        return MeanPrecision(self.measure)


def _mask_rcnn(classes: int, backbone: str | None) -> nn.Module:
    """Return torchvision's Mask R-CNN of a ResNet-50, of which a given backbone is trained from its second layer on."""
    detection = torchvision("models.detection")
    build = torchvision("models.detection.backbone_utils").resnet_fpn_backbone
    if backbone is None:
        trunk = build(backbone_name="resnet50", weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5)
    else:
        trunk = build(backbone_name="resnet50", weights=None, trainable_layers=3)
        trunk.body.load_state_dict(_weights(backbone, trunk.body))
    network: nn.Module = detection.MaskRCNN(trunk, classes)
    return network


def _weights(path: str, body: nn.Module) -> dict[str, Tensor]:
    """Return the weights in a file that a trunk has.

    Raises:
        ValueError: The file is none of weights, or lacks some of them.
    """
    allowed = "a file of weights of torchvision's ResNet-50, as torch.save writes them"
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        found = {name: saved[name] for name in body.state_dict()}
        fits = all(found[name].shape == value.shape for name, value in body.state_dict().items())
    except Exception as error:  # torch has no one class for these
        require(False, "backbone", path, f"{allowed} ({type(error).__name__}: {error})")
    require(fits, "backbone", path, allowed)
    return found


def _small(classes: int) -> nn.Module:
    """Return a Mask R-CNN of the same parts for scenes: a residual trunk of ten layers, heads of 32 channels."""
    resnet = torchvision("models.resnet")
    detection = torchvision("models.detection")
    mask = torchvision("models.detection.mask_rcnn")
    faster = torchvision("models.detection.faster_rcnn")
    anchors = torchvision("models.detection.rpn").AnchorGenerator
    fpn = torchvision("models.detection.backbone_utils").BackboneWithFPN
    trunk = fpn(
        resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1]),
        {f"layer{number}": str(number - 1) for number in range(1, 5)},
        [64, 128, 256, 512],
        out_channels=32,
    )
    network: nn.Module = detection.MaskRCNN(
        trunk,
        min_size=_SIDE,
        max_size=_SIDE,
        rpn_anchor_generator=anchors(((8,), (16,), (32,), (64,), (96,)), ((0.5, 1.0, 2.0),) * 5),
        rpn_pre_nms_top_n_train=200,
        rpn_pre_nms_top_n_test=100,
        rpn_post_nms_top_n_train=200,
        rpn_post_nms_top_n_test=100,
        rpn_batch_size_per_image=64,
        box_batch_size_per_image=64,
        box_detections_per_img=20,
        box_head=faster.TwoMLPHead(32 * 7 * 7, 64),
        box_predictor=faster.FastRCNNPredictor(64, classes),
        mask_head=mask.MaskRCNNHeads(32, (32, 32), 1),
        mask_predictor=mask.MaskRCNNPredictor(32, 32, classes),
    )
    return network
