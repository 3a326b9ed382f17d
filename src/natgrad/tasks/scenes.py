"""Scenes: up to four digits over a photograph, with the pixels of each one known.

Fonts and photographs are those of the glyphs. Test scenes use other fonts and other parts of the photographs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from natgrad.tasks.facts import DIGITS
from natgrad.tasks.glyphs import LUMA, TEST_FONTS, TRAIN_FONTS, crops, inks, photographs, place, stencils

CLASSES = 1 + DIGITS  # the background first, then the digits
OBJECTS = 4  # at most in a scene
SCALE = (0.4, 0.9)  # of a stencil, in sides of a scene; a digit is about half as wide
SHIFT = 0.7  # of half a scene's side, either way
TILT = math.radians(30)  # either way
LEAST_PIXELS = 12  # of an object that later ones cover in part; of fewer, it counts as background
TEST_SHARE = 4  # training scenes per test scene
_CHUNK = 128  # scenes drawn at once


@dataclass(frozen=True)
class Scenes:
    """Pictures of objects.

    Attributes:
        pictures: uint8 [N, 3, H, W].
        owners: The object that each pixel shows, from 1; 0: the background. uint8 [N, H, W].
        labels: The class of each object, from 1, 0 where there is none. int64 [N, objects].
    """

    pictures: Tensor
    owners: Tensor
    labels: Tensor

    def __len__(self) -> int:
        """Return the number of scenes."""
        return len(self.pictures)

    def classes(self) -> Tensor:
        """Return the class of each pixel; 0: the background. int64 [N, H, W]."""
        by_owner = torch.cat((torch.zeros_like(self.labels[:, :1]), self.labels), dim=1)
        return by_owner.gather(1, self.owners.flatten(1).long()).view(self.owners.shape)

    def instances(self, index: int) -> dict[str, Tensor]:
        """Return the n objects of a scene, as torchvision's detection models take them.

        Returns:
            boxes: Left, top, right and bottom edges in pixels, float32 [n, 4].
            labels: int64 [n].
            masks: uint8 [n, H, W].
        """
        present = self.labels[index].nonzero().flatten()
        masks = self.owners[index] == (present + 1)[:, None, None]
        (top, bottom), (left, right) = (_ends(masks.any(dim=axis)) for axis in (2, 1))
        boxes = torch.stack((left, top, right, bottom), dim=1).float()
        return {"boxes": boxes, "labels": self.labels[index, present], "masks": masks.to(torch.uint8)}


def _ends(hit: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index of each row [n, length] that is True, and the one after the last."""
    steps = torch.arange(1, hit.shape[1] + 1)
    return hit.shape[1] - (steps.flip(0) * hit).amax(dim=1), (steps * hit).amax(dim=1)


def render(fonts: tuple[str, ...], photos: Tensor, count: int, side: int, generator: Generator) -> Scenes:
    """Draw scenes, with the font, class, place, size, tilt and colour of each object at random.

    Args:
        fonts: Names of the fonts to draw from.
        photos: Photographs for the backgrounds [photos, 3, H, W], in [0, 1].
        count: The number of scenes.
        side: Pixels of a side.
        generator: The random number generator.
    """
    parts = [_draw(fonts, photos, min(_CHUNK, count - start), side, generator) for start in range(0, count, _CHUNK)]
    return Scenes(*(torch.cat([getattr(part, name) for part in parts]) for name in ("pictures", "owners", "labels")))


def _draw(fonts: tuple[str, ...], photos: Tensor, count: int, side: int, generator: Generator) -> Scenes:
    shapes = stencils(fonts)
    pictures = crops(photos, count, side, generator)
    owners = torch.zeros(count, side, side, dtype=torch.uint8)
    labels = torch.zeros(count, OBJECTS, dtype=torch.int64)
    objects = torch.randint(OBJECTS + 1, (count,), generator=generator)
    for number in range(OBJECTS):
        label = torch.randint(1, CLASSES, (count,), generator=generator)
        style = torch.randint(len(fonts), (count,), generator=generator)
        size, tilt, right, down = torch.rand(4, count, generator=generator)
        coverage = place(
            shapes[style, label - 1],  # the digits are the first characters
            side,
            SCALE[0] + (SCALE[1] - SCALE[0]) * size,
            TILT * (2 * tilt - 1),
            SHIFT * (2 * torch.stack((right, down), dim=1) - 1),
        )
        coverage = coverage * (number < objects)[:, None, None]
        luma = torch.einsum("nchw,c->nhw", pictures, LUMA)
        behind = (coverage * luma).sum(dim=(1, 2)) / coverage.sum(dim=(1, 2)).clamp(min=1)
        pictures = torch.lerp(pictures, inks(behind, generator)[:, :, None, None], coverage[:, None])
        owners[coverage > 0.5] = number + 1
        labels[:, number] = label
    pixels = torch.stack([(owners == number + 1).sum(dim=(1, 2)) for number in range(OBJECTS)], dim=1)
    labels *= pixels >= LEAST_PIXELS
    shown = torch.cat((torch.zeros(count, 1, dtype=torch.int64), labels), dim=1) > 0
    owners *= shown.gather(1, owners.flatten(1).long()).view(owners.shape)
    return Scenes((255 * pictures).round().to(torch.uint8), owners, labels)


def scenes(count: int, *, side: int, seed: int = 0) -> tuple[Scenes, Scenes]:
    """Return `count` scenes for training and a quarter as many for testing, of at most 160 pixels a side."""
    train_photos, test_photos = photographs()
    # Even and odd seeds: no test set uses the random numbers of another seed's training set.
    train_generator, test_generator = (Generator().manual_seed(2 * seed + part) for part in range(2))
    return (
        render(TRAIN_FONTS, train_photos, count, side, train_generator),
        render(TEST_FONTS, test_photos, count // TEST_SHARE, side, test_generator),
    )
