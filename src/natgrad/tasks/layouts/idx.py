"""MNIST and Fashion-MNIST as they are distributed: idx files, with or without gzip."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from natgrad.tasks.base import DataError
from natgrad.tasks.layouts.folder import check_distinct, check_labels, find

_IMAGES, _LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
_CLASSES = 10
_SUBFOLDERS = {
    "mnist": ("MNIST/raw", "MNIST", "mnist"),
    "fashion-mnist": ("FashionMNIST/raw", "FashionMNIST", "fashion-mnist", "fashion"),
}
_TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}

# The files of both data sets have the same names and sizes: the first labels tell them apart.
_FIRST_LABELS = {"mnist": [5, 0, 4, 1, 9, 2, 1, 3], "fashion-mnist": [9, 0, 0, 3, 0, 2, 7, 2]}


def read(name: str, folder: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Read "mnist" or "fashion-mnist".

    Args:
        name: The data set.
        folder: Its folder, or the one above.

    Returns:
        For training and testing: pixels, uint8 [N, 1, 28, 28], and labels, int64 [N].

    Raises:
        ValueError: There is no such folder.
        DataError: A file is missing, damaged or another than expected.
    """
    title = _TITLES[name]
    files = [f"{part}-{kind}" for part in ("train", "t10k") for kind in (_IMAGES, _LABELS)]
    place = find(folder, _SUBFOLDERS[name], [f"{file}{end}" for file in files for end in ("", ".gz")])
    if place is None:
        places = ", ".join(_SUBFOLDERS[name])
        raise DataError(
            f"{folder} has no {title}: expected {', '.join(files)}, each with or without .gz, in the folder itself or "
            f"in {places}"
        )
    paths = [path if (path := place / file).is_file() else place / f"{file}.gz" for file in files]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path.with_suffix('')} is missing, with and without .gz: {title} has {', '.join(files)}")
    train, test = (_read_part(paths[at], paths[at + 1], title) for at in (0, 2))
    check_distinct({paths[0]: train[0], paths[2]: test[0]})
    for other, labels in _FIRST_LABELS.items():
        if other != name and train[1][: len(labels)].tolist() == labels:
            raise DataError(f"{place} has {_TITLES[other]}, and the task is for {title}")
    return train, test


def _read_part(images: Path, labels: Path, title: str) -> tuple[Tensor, Tensor]:
    pixels, classes = _read_file(images, 3, title), _read_file(labels, 1, title)
    if tuple(pixels.shape[1:]) != (28, 28):
        raise DataError(f"{images} has images of {list(pixels.shape[1:])} pixels, and {title} of [28, 28]")
    if len(pixels) != len(classes):
        raise DataError(f"{images} has {len(pixels)} images, and {labels} {len(classes)} labels")
    check_labels(labels, classes, _CLASSES, title)
    return pixels[:, None], classes.long()


def _read_file(path: Path, dimensions: int, title: str) -> Tensor:
    """Read an idx file of bytes: two zeros, the type 8, the number of dimensions, each size, and the values."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    start = 4 + 4 * dimensions
    magic = content[:4]
    if magic != bytes([0, 0, 8, dimensions]) or len(content) < start:
        kinds = {bytes([0, 0, 8, 1]): "labels", bytes([0, 0, 8, 3]): "images"}
        found = kinds.get(magic, f"no idx file of bytes (it begins with {magic.hex() or 'nothing'})")
        raise DataError(f"{path} is {found}, and {title} has {kinds[bytes([0, 0, 8, dimensions])]} there")
    sizes = struct.unpack(f">{dimensions}I", content[4:start])
    expected = start + int(np.prod(sizes, dtype=object))
    if len(content) != expected or not sizes[0]:
        raise DataError(f"{path} has {len(content)} bytes, and its header says {expected} for {list(sizes)}")
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=start).copy()).view(sizes)
