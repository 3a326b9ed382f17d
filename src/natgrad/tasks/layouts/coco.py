"""Reading COCO's annotations of instances."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from natgrad.errors import require, warn
from natgrad.tasks.base import DataError
from natgrad.tasks.vision import pycocotools

PARTS = ("train2017", "val2017")

# The fields that are read, with the types that JSON has for them.
_FIELDS: dict[str, dict[str, Any]] = {
    "categories": {"id": int},
    "images": {"id": int, "file_name": str, "height": int, "width": int},
    "annotations": {"image_id": int, "category_id": int, "bbox": list, "iscrowd": int, "segmentation": list | dict},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """An object in a picture.

    Attributes:
        box: Left, top, right and bottom edges in pixels.
        label: Its class, from 1.
        outline: Polygons, or run lengths, as JSON: COCO's millions of numbers would take gigabytes.
        is_crowd: Whether it is a group of objects.
    """

    box: tuple[float, float, float, float]
    label: int
    outline: str
    is_crowd: bool


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture and its objects, perhaps none.

    Attributes:
        path: The file.
        height: Its height in pixels.
        width: Its width in pixels.
        instances: The objects.
    """

    path: Path
    height: int
    width: int
    instances: list[Instance]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the data set.

    Attributes:
        pictures: Its pictures in the order of the file.
        categories: The identifiers of the categories, sorted, which may have gaps; the class of the first is 1.
    """

    pictures: list[Picture]
    categories: list[int]


def read(folder: Path) -> tuple[Part, Part]:
    """Return the parts for training and validation. The pictures themselves are not opened.

    Raises:
        ValueError: There is no such folder.
        DataError: A file is missing or damaged, or the categories of both parts differ.
    """
    require(folder.is_dir(), "data", str(folder), "an existing folder")
    train, val = (_part(folder, name) for name in PARTS)
    differing = sorted({*train.categories} ^ {*val.categories})
    if differing:
        raise DataError(f"{folder}: category {differing[0]} is in the annotations of only one of {' and '.join(PARTS)}")
    return train, val


def _part(folder: Path, name: str) -> Part:
    path = folder / "annotations" / f"instances_{name}.json"
    found = _load(path)
    categories = sorted({each["id"] for each in found["categories"]})
    labels = {category: label for label, category in enumerate(categories, 1)}
    pictures = _pictures(folder / name, path, found["images"])
    without_area = 0
    for number, each in enumerate(found["annotations"]):
        picture = pictures.get(each["image_id"])
        if picture is None or each["category_id"] not in labels:
            what = "image_id" if picture is None else "category_id"
            raise DataError(f"{path}: annotation {number} has {what} {each[what]}, which the file does not have")
        box = _box(path, number, each["bbox"], picture)
        if box[0] >= box[2] or box[1] >= box[3]:
            without_area += 1
            continue
        label = labels[each["category_id"]]
        outline = json.dumps(each["segmentation"])
        picture.instances.append(Instance(box=box, label=label, outline=outline, is_crowd=bool(each["iscrowd"])))
    if without_area:
        boxes = "box without width or height is" if without_area == 1 else "boxes without width or height are"
        warn(f"{path}: {without_area} {boxes} left out", "samples-left-out")
    return Part(pictures=list(pictures.values()), categories=categories)


def _load(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the lists of a file, whose entries have all fields."""
    if not path.is_file():
        raise DataError(f"{path} is missing: COCO has annotations/instances_{PARTS[0]}.json and the same of {PARTS[1]}")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON that can be read: {error}") from error
    for kind, wanted in _FIELDS.items():
        entries = found.get(kind) if isinstance(found, dict) else None
        if not isinstance(entries, list) or (not entries and kind != "annotations"):
            raise DataError(f"{path} has no list of {kind}: it is no file of COCO's instances")
        for number, entry in enumerate(entries):
            wrong = [name for name, of in wanted.items() if not _fits(entry, name, of)]
            if wrong:
                raise DataError(f"{path}: entry {number} of {kind} has no {wrong[0]}, or one of another kind")
    lists: dict[str, list[dict[str, Any]]] = found
    return lists


def _fits(entry: Any, name: str, kind: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get(name), kind) and not isinstance(entry[name], bool)


def _pictures(folder: Path, path: Path, entries: list[dict[str, Any]]) -> dict[int, Picture]:
    """Return the pictures by identifier."""
    if not folder.is_dir():
        raise DataError(f"{folder} is missing: it has the pictures of {path.name}")
    there = {each.name for each in folder.iterdir()}
    missing = [entry["file_name"] for entry in entries if entry["file_name"] not in there]
    if missing:
        raise DataError(f"{folder / missing[0]} is missing, one of {len(missing)} pictures that {path.name} names")
    return {
        entry["id"]: Picture(
            path=folder / entry["file_name"], height=entry["height"], width=entry["width"], instances=[]
        )
        for entry in entries
    }


def _box(path: Path, number: int, values: list[Any], picture: Picture) -> tuple[float, float, float, float]:
    """Return the edges of a box [left, top, width, height], cut at those of the picture."""
    if len(values) != 4 or not all(isinstance(value, int | float) and isfinite(value) for value in values):
        raise DataError(f"{path}: annotation {number} has bbox {values}, which is not left, top, width and height")
    left, top, width, height = values
    right, bottom = min(left + width, picture.width), min(top + height, picture.height)
    return max(left, 0.0), max(top, 0.0), right, bottom


def masks(picture: Picture) -> np.ndarray:
    """Return the mask of each object, numpy uint8 [n, height, width].

    Raises:
        DataError: An outline is neither polygons nor run lengths of the picture.
    """
    mask = pycocotools()
    decoded = np.zeros((len(picture.instances), picture.height, picture.width), np.uint8)
    for index, instance in enumerate(picture.instances):
        outline = json.loads(instance.outline)
        try:
            if not isinstance(outline, Mapping):
                encoded = mask.merge(mask.frPyObjects(outline, picture.height, picture.width)) if outline else None
            elif isinstance(outline["counts"], list):
                encoded = mask.frPyObjects(outline, *outline["size"])
            else:
                encoded = {**outline, "counts": outline["counts"].encode()}
            if encoded is not None:
                decoded[index] = mask.decode(encoded)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise DataError(
                f"{picture.path}: the outline of object {index} is neither polygons nor run lengths of a picture of "
                f"{picture.height} x {picture.width} pixels ({error})"
            ) from error
    return decoded
