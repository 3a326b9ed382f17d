"""LGG's brain scans as they are distributed: a folder for each patient, with slices and their masks."""

from __future__ import annotations

import random
from pathlib import Path

from natgrad.errors import require
from natgrad.tasks.base import DataError
from natgrad.tasks.layouts.pairs import Pair, check_partners

CLASSES = {0: 0, 255: 1}  # of a mask's values
_TEST_PATIENTS = 10
_FOLDERS = ("kaggle_3m", "lgg-mri-segmentation/kaggle_3m")
_END = "_mask.tif"


def read(folder: Path) -> tuple[list[Pair], list[Pair]]:
    """Return the slices of the patients for training and of those for testing.

    Ten patients are for testing, of fewer than 20 half of them: those that `random.seed(42)` and `random.sample` draw
    from the sorted names, as the authors of the data set do.

    Args:
        folder: kaggle_3m, or a folder above.

    Raises:
        ValueError: There is no such folder.
        DataError: A file is missing, or there are fewer than two patients.
    """
    require(folder.is_dir(), "data", str(folder), "an existing folder")
    places = [folder, *(folder / name for name in _FOLDERS)]
    root = next((place for place in places if any(place.glob(f"*/*{_END}"))), None)
    if root is None:
        raise DataError(
            f"{folder} has no LGG MRI: expected PATIENT/PATIENT_1.tif and PATIENT/PATIENT_1{_END}, in the folder "
            f"itself or in {' or '.join(_FOLDERS)}"
        )
    files = sorted(root.glob("*/*.tif"))
    pictures = {str(path).removesuffix(_END).removesuffix(".tif"): path for path in files}
    pairs = check_partners(
        {name: Path(f"{name}.tif") for name in pictures}, {name: Path(f"{name}{_END}") for name in pictures}
    )
    patients = sorted({picture.parent.name for picture, _ in pairs})
    if len(patients) < 2:
        raise DataError(f"{root} has one patient, {patients[0]}, and LGG MRI at least 2, for training and for testing")
    held = random.Random(42).sample(patients, min(_TEST_PATIENTS, len(patients) // 2))
    train = [pair for pair in pairs if pair[0].parent.name not in held]
    return train, [pair for pair in pairs if pair[0].parent.name in held]
