"""Finding the files of a data set, with errors that name what was expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from natgrad.errors import require, warn
from natgrad.tasks.base import DataError


def find(folder: Path, subfolders: Sequence[str], names: Sequence[str]) -> Path | None:
    """Return the folder itself or its first subfolder that has one of some files, or None.

    Raises:
        ValueError: There is no such folder.
    """
    require(folder.is_dir(), "data", str(folder), "an existing folder")
    places = [folder, *(folder / name for name in subfolders)]
    return next((place for place in places if any((place / name).is_file() for name in names)), None)


def check_labels(path: Path, labels: Tensor, classes: int, what: str) -> None:
    """Check that labels are indices of classes.

    Raises:
        DataError: A label is not.
    """
    wrong = ((labels < 0) | (labels >= classes)).nonzero().flatten()
    if len(wrong):
        first = int(wrong[0])
        raise DataError(f"{path}: label {int(labels[first])} of sample {first}, and {what} has 0 to {classes - 1}")


def check_distinct(parts: Mapping[Path, Tensor]) -> None:
    """Check that no file has the same images as another.

    Raises:
        DataError: Two files are equal.
    """
    for (first, images), (second, others) in combinations(parts.items(), 2):
        if torch.equal(images, others):
            raise DataError(f"{second} has the same images as {first}: one of them is a copy")


def report_left_out(path: Path, count: int, total: int, what: str) -> None:
    """Warn of samples that are left out, if there are any.

    Raises:
        DataError: These are all samples.
    """
    if count == total:
        raise DataError(f"{path} has nothing but {what}")
    if count:
        warn(f"{path}: left out {count} of {total} {what}", "samples-left-out")
