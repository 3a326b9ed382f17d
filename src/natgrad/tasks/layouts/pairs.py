"""Pictures and masks in pairs of files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from natgrad.tasks.base import DataError
from natgrad.tasks.pictures import errors_named, read

Pair = tuple[Path, Path]
"""The files of a picture and of its mask."""


def check_partners(pictures: Mapping[str, Path], masks: Mapping[str, Path]) -> list[Pair]:
    """Return the pairs of files with the same key, in the order of the keys.

    Args:
        pictures: The path of each picture, where there should be one.
        masks: The path of each mask, where there should be one.

    Raises:
        DataError: A file is missing.
    """
    pairs = [(pictures[key], masks[key]) for key in sorted(pictures)]
    for picture, mask in pairs:
        for path, partner in ((picture, mask), (mask, picture)):
            if not path.is_file():
                raise DataError(f"{path} is missing: {partner} belongs to it")
    return pairs


def check_sizes(pairs: Sequence[Pair], multiple: int) -> None:
    """Check that all files are pictures of one size whose sides are multiples of a number; masks have one channel.

    Raises:
        DataError: A file is not.
    """
    expected = _header(pairs[0][0])[0]
    for picture, mask in pairs:
        for path in (picture, mask):
            size, mode = _header(path)
            if size != expected:
                raise DataError(f"{path} has {_text(size)} pixels, and {pairs[0][0]} {_text(expected)}")
            if path == mask and mode != "L":
                raise DataError(f"{path} has pixels of mode {mode}, and a mask has one channel of 8 bits (L)")
    if any(side % multiple for side in expected):
        raise DataError(f"{pairs[0][0]} has {_text(expected)} pixels, and its sides should be multiples of {multiple}")


def _header(path: Path) -> tuple[tuple[int, int], str]:
    with errors_named(path), Image.open(path) as image:
        return image.size, image.mode


def _text(size: tuple[int, int]) -> str:
    return " x ".join(map(str, size))


def read_mask(path: Path, classes: Mapping[int, int]) -> Image.Image:
    """Return a mask as classes.

    Args:
        path: Its file.
        classes: The class of each value of a pixel.

    Raises:
        DataError: It cannot be read, or has another value.
    """
    values = np.asarray(read(path, "L"))
    table = np.full(256, -1, dtype=np.int16)
    table[list(classes)] = list(classes.values())
    found: npt.NDArray[np.int16] = table[values]
    if (found < 0).any():
        row, column = np.argwhere(found < 0)[0]
        raise DataError(
            f"{path} has {values[row, column]} in row {row}, column {column}, and its values are "
            f"{', '.join(map(str, sorted(classes)))}"
        )
    return Image.fromarray(found.astype(np.uint8))
