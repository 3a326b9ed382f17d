"""ImageNet: one folder for each class, or tar shards."""

from __future__ import annotations

from pathlib import Path

from natgrad.errors import require
from natgrad.tasks.base import DataError
from natgrad.tasks.layouts import shards
from natgrad.tasks.pictures import Picture
from natgrad.tasks.vision import torchvision

_PARTS = ("train", "val")
_LAYOUTS = "ImageNet has train/CLASS/PICTURE and val/CLASS/PICTURE, or shards train/*.tar and val/*.tar"


def read(folder: Path, classes: int) -> tuple[list[Picture], list[Picture]]:
    """Return the pictures for training and testing.

    They are in `train/CLASS` and `val/CLASS`, where a class has the index of its folder in the order of names, or, if
    `train` has no folders, in shards `train/*.tar` and `val/*.tar`, or `*train*.tar` and `*val*.tar` in the folder.

    Args:
        folder: The folder.
        classes: The number of classes of shards.

    Raises:
        ValueError: There is no such folder.
        DataError: A folder or file is missing, damaged or without pictures, or the classes of both parts differ.
    """
    require(folder.is_dir(), "data", str(folder), "an existing folder")
    has_classes = any(place.is_dir() for place in folder.glob("train/*"))
    train, val = (sorted((folder / part).glob("*.tar")) or sorted(folder.glob(f"*{part}*.tar")) for part in _PARTS)
    if has_classes or (not train and not val):
        return _read_folders(folder)
    for part, found in zip(_PARTS, (train, val), strict=True):
        if not found:
            raise DataError(f"{folder} has no shards {part}/*.tar or *{part}*.tar, but those of the other part")
    return shards.read(train, classes), shards.read(val, classes)


def _read_folders(folder: Path) -> tuple[list[Picture], list[Picture]]:
    found = {}
    for part in _PARTS:
        place = folder / part
        if not place.is_dir():
            raise DataError(f"{place} is missing: {_LAYOUTS}")
        if not any(child.is_dir() for child in place.iterdir()):
            raise DataError(f"{place} has no folders: its pictures belong into one folder for each class")
        try:
            found[part] = torchvision("datasets").ImageFolder(str(place))
        except FileNotFoundError as error:
            raise DataError(f"{place}: {error}") from error
    train, val = found["train"], found["val"]
    differing = sorted({*train.classes} ^ {*val.classes})
    if differing:
        where = "train" if differing[0] in train.classes else "val"
        raise DataError(
            f"{folder}: class {differing[0]} is in {where} alone; train has {len(train.classes)} classes, and val "
            f"{len(val.classes)}"
        )
    train, val = ([Picture(path, label) for path, label in part.samples] for part in (train, val))
    return train, val
