"""Cityscapes as it is distributed: leftImg8bit and gtFine, with a folder for each city in train and in val."""

from __future__ import annotations

from pathlib import Path

from natgrad.errors import require
from natgrad.tasks.applications.segmentation import IGNORED
from natgrad.tasks.base import DataError
from natgrad.tasks.layouts.pairs import Pair, check_partners

_TRAINED = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)  # of 34 ids, in order of classes
CLASSES = {label: _TRAINED.index(label) if label in _TRAINED else IGNORED for label in range(34)}
_PICTURE, _MASK = "_leftImg8bit.png", "_gtFine_labelIds.png"


def read(folder: Path) -> tuple[list[Pair], list[Pair]]:
    """Return the pictures of train and of val with the fine annotations.

    Raises:
        ValueError: There is no such folder.
        DataError: A folder or a file is missing.
    """
    require(folder.is_dir(), "data", str(folder), "an existing folder")
    return _part(folder, "train"), _part(folder, "val")


def _part(folder: Path, part: str) -> list[Pair]:
    pictures, masks = folder / "leftImg8bit" / part, folder / "gtFine" / part
    for place in (pictures, masks):
        if not place.is_dir():
            raise DataError(f"{place} is missing: Cityscapes has leftImg8bit and gtFine, with train and val in each")
    found = [str(path.relative_to(pictures)).removesuffix(_PICTURE) for path in pictures.glob(f"*/*{_PICTURE}")]
    marked = [str(path.relative_to(masks)).removesuffix(_MASK) for path in masks.glob(f"*/*{_MASK}")]
    names = {*found, *marked}
    if not names:
        raise DataError(f"{pictures} has no CITY/*{_PICTURE}")
    return check_partners(
        {name: pictures / f"{name}{_PICTURE}" for name in names}, {name: masks / f"{name}{_MASK}" for name in names}
    )
