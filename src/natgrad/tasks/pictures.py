"""Pictures in files, decoded when they are needed."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from natgrad.tasks.base import DataError
from natgrad.tasks.images import normalise
from natgrad.tasks.unreadable import Unreadable


@contextmanager
def errors_named(picture: object) -> Iterator[None]:
    """Turn an error in reading a picture into a `DataError` that names it."""
    try:
        yield
    except Exception as error:  # damaged pictures raise errors of many classes
        raise DataError(f"{picture} is no picture that can be read: {error}") from error


def read(path: Path, mode: str) -> Image.Image:
    """Return a picture in a mode.

    Raises:
        DataError: It cannot be read.
    """
    with errors_named(path), Image.open(path) as image:
        return image.convert(mode)


class Picture(NamedTuple):
    """A labelled picture in a file, or in a part of one.

    Attributes:
        path: The file.
        label: The index of the class.
        name: The name of the picture within the file; empty: the file is the picture.
        offset: The first byte.
        size: The number of bytes; -1: all from the first one on.
    """

    path: str
    label: int
    name: str = ""
    offset: int = 0
    size: int = -1

    def __str__(self) -> str:
        """Return the file, and the name within it, for a message."""
        return f"{self.path}: {self.name}" if self.name else self.path

    def decode(self) -> Image.Image:
        """Return the picture in RGB.

        Raises:
            DataError: It cannot be read.
        """
        with errors_named(self):
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                content = file.read(self.size)
            with Image.open(io.BytesIO(content)) as image:
                return image.convert("RGB")


@dataclass(frozen=True, kw_only=True, eq=False)
class Pictures:
    """Labelled pictures in files. The next one that can be read takes the place of one that cannot.

    Attributes:
        pictures: The pictures.
        mean: The mean of each channel in [0, 1], which is subtracted.
        deviation: The deviation of each channel, which the difference is divided by.
        view: Makes a square picture of one of any size.
        random_view: The same for training, with random numbers of torch's global generator.
        unreadable: The pictures that could not be read.
        draw: The seed and epoch of the augmentation; None: `view`.
    """

    pictures: Sequence[Picture]
    mean: Sequence[float]
    deviation: Sequence[float]
    view: Callable[[Image.Image], Image.Image]
    random_view: Callable[[Image.Image], Image.Image]
    unreadable: Unreadable
    draw: tuple[int, int] | None = None

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.pictures)

    def __getitem__(self, indices: list[int] | slice) -> tuple[Tensor, Tensor]:
        """Return normalised pictures [B, 3, side, side] and labels [B].

        Raises:
            DataError: A hundred pictures in a row cannot be read.
        """
        chosen = range(len(self))[indices] if isinstance(indices, slice) else indices
        read = [self.unreadable.substitute(self._read, index) for index in chosen]
        pixels, labels = torch.stack([picture for picture, _ in read]), torch.tensor([label for _, label in read])
        return normalise(pixels, self.mean, self.deviation), labels

    def augmented(self, seed: int, epoch: int) -> Pictures:
        """Return the pictures of an epoch. Their augmentation follows from seed, epoch and sample alone."""
        return replace(self, draw=(seed, epoch))

    def _read(self, index: int) -> tuple[Tensor, int]:
        picture = self.pictures[index].decode()
        if self.draw is None:
            picture = self.view(picture)
        else:
            with torch.random.fork_rng(devices=[]):
                (seed,) = np.random.SeedSequence((*self.draw, index)).generate_state(1, np.uint64)
                torch.default_generator.manual_seed(int(seed >> np.uint64(1)))
                picture = self.random_view(picture)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1), self.pictures[index].label
