"""Classes of photographs, by any model of timm. Needs torchvision and timm."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn

from natgrad.errors import require
from natgrad.tasks import applications
from natgrad.tasks.imagenet import ImageNet
from natgrad.tasks.vision import timm


@dataclass(frozen=True, kw_only=True)
class Timm(applications.Timm, ImageNet):
    """The data and model of the task."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = isinstance(self.network, str) and timm().is_model(self.network)
        near = [] if fits else get_close_matches(str(self.network), timm().list_models())
        nearest = f", such as {' or '.join(near)}" if near else ""
        require(fits, "network", self.network, f"one of timm.list_models(){nearest}")

    @property
    def side(self) -> int:
        """The pixels of a side of a picture: those of the model's configuration."""
        side: int = timm().get_pretrained_cfg(self.network).input_size[-1]
        return side

    def model(self) -> nn.Module:
        """Build a network from [B, 3, H, W] to logits [B, classes]."""
        model: nn.Module = timm().create_model(self.network, num_classes=self.image_classes)
        return model
