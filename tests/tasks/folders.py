"""Tiny data sets in the layouts in which the real ones are distributed."""

import gzip
import json
import pickle
import struct
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image

Part = tuple[np.ndarray, np.ndarray]


def images(count: int, shape: tuple[int, ...], classes: int, seed: int) -> Part:
    """Return random pixels and labels, each class once before any twice."""
    pixels = np.random.default_rng(seed).integers(256, size=(count, *shape), dtype=np.uint8)
    return pixels, (np.arange(count) * 7 + seed) % classes


class Python2Pickler(pickle._Pickler):
    """Writes text and bytes as strings, as Python 2 did."""

    def save_string(self, text: str | bytes) -> None:
        content = text.encode("latin1") if isinstance(text, str) else text
        self.write(b"T" + struct.pack("<i", len(content)) + content)

    dispatch: ClassVar = {**pickle._Pickler.dispatch, bytes: save_string, str: save_string}


def write_pickle(path: Path, value: object) -> None:
    with path.open("wb") as file:
        Python2Pickler(file, 2).dump(value)
    path.write_bytes(path.read_bytes().replace(b"numpy._core", b"numpy.core"))


def cifar10(folder: Path, kind: str, count: int = 4) -> list[Part]:
    """Write five training batches of `count` images and one for testing as "bin" or "py", and return them."""
    parts = [images(count, (3, 32, 32), 10, seed) for seed in range(6)]
    folder.mkdir(parents=True, exist_ok=True)
    for number, (pixels, labels) in enumerate(parts, 1):
        name = f"data_batch_{number}" if number < 6 else "test_batch"
        title = f"training batch {number} of 5" if number < 6 else "testing batch 1 of 1"
        flat = pixels.reshape(count, -1)
        if kind == "bin":
            np.concatenate((labels[:, None].astype(np.uint8), flat), 1).tofile(folder / f"{name}.bin")
        else:
            write_pickle(folder / name, {"batch_label": title, "labels": labels.tolist(), "data": flat})
    return parts


def cifar100(folder: Path, kind: str, count: int = 12) -> list[Part]:
    """Write a training and a test batch as "bin" or "py", and return them."""
    parts = [images(count, (3, 32, 32), 100, seed) for seed in range(2)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, (pixels, labels) in zip(("train", "test"), parts, strict=True):
        flat, coarse = pixels.reshape(count, -1), labels // 5
        if kind == "bin":
            both = np.stack((coarse, labels), 1).astype(np.uint8)
            np.concatenate((both, flat), 1).tofile(folder / f"{name}.bin")
        else:
            title = f"{name}ing batch 1 of 1"
            batch = {"batch_label": title, "fine_labels": labels.tolist(), "coarse_labels": coarse.tolist()}
            write_pickle(folder / name, {**batch, "data": flat})
    return parts


def idx_bytes(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def idx(folder: Path, kind: str, count: int = 12) -> list[Part]:
    """Write training and test files as "raw" or "gz", and return their contents."""
    parts = [images(count, (1, 28, 28), 10, seed) for seed in range(2)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, (pixels, labels) in zip(("train", "t10k"), parts, strict=True):
        for file, values in (("images-idx3-ubyte", pixels[:, 0]), ("labels-idx1-ubyte", labels.astype(np.uint8))):
            content = idx_bytes(values)
            if kind == "gz":
                (folder / f"{name}-{file}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / f"{name}-{file}").write_bytes(content)
    return parts


def lgg(folder: Path, patients: int = 4, slices: int = 2, size: tuple[int, int] = (32, 32)) -> dict[Path, np.ndarray]:
    """Write slices of patients, two thirds with a rectangle as the tumour, and return their masks."""
    generator, masks = np.random.default_rng(0), {}
    for number in range(patients * slices):
        patient = f"TCGA_XX_{number // slices:04}_19990101"
        path = folder / patient / f"{patient}_{number % slices + 1}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        mask = np.zeros(size, dtype=np.uint8)
        if number % 3:
            mask[4 + number % 5 : 16, 6:24] = 255
        pixels = generator.integers(100, size=(*size, 3), dtype=np.uint8) + (mask // 2)[:, :, None]
        Image.fromarray(pixels).save(path)
        Image.fromarray(mask).save(path.with_name(f"{path.stem}_mask.tif"))
        masks[path] = mask
    return masks


def cityscapes(folder: Path, pictures: int = 4, size: tuple[int, int] = (32, 64)) -> dict[Path, np.ndarray]:
    """Write `pictures` for training and half as many for validation in two cities each, and return their ids.

    The ids of each picture are 0 to 33 in its columns, and its grey values 7 times as large.
    """
    found = {}
    for part, count in (("train", pictures), ("val", pictures // 2)):
        for number in range(count):
            city = f"{part}{number % 2}"
            name = f"{city}/{city}_{number:06}_000019"
            picture = folder / "leftImg8bit" / part / f"{name}_leftImg8bit.png"
            mask = folder / "gtFine" / part / f"{name}_gtFine_labelIds.png"
            ids = np.broadcast_to((np.arange(size[1]) // 2 + number) % 34, size).astype(np.uint8)
            for path, values in ((picture, np.repeat(7 * ids[:, :, None], 3, 2)), (mask, ids)):
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(values).save(path)
            found[picture] = ids
    return found


def coco(folder: Path, count: int = 6) -> dict[str, dict]:
    """Write `count` pictures for training and half as many for testing, and return the contents of both annotations.

    Picture 0 has no objects, 1 a crowd beside an object, 2 a box without width. Identifiers of categories have gaps.
    """
    generator, written = np.random.default_rng(0), {}
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    for part, size in (("train2017", count), ("val2017", count // 2)):
        (folder / part).mkdir()
        pictures, objects = [], []
        for number in range(size):
            height, width = (int(side) for side in generator.integers(60, 90, 2))
            pixels = generator.integers(256, size=(height, width, 3), dtype=np.uint8)
            name = f"{part}-{number}.png"
            Image.fromarray(pixels).convert("L" if number == 3 else "RGB").save(folder / part / name)
            pictures.append({"id": 7 + 3 * number, "file_name": name, "height": height, "width": width})
            for _ in range(min(number, 2)):
                left, top = (int(side) for side in generator.integers(5, 25, 2))
                objects.append(square(7 + 3 * number, int(generator.choice([1, 3, 90])), left, top, 30, 20))
            if number == 1:
                objects.append(crowd(7 + 3, height, width))
            if number == 2 and part == "train2017":
                objects.append({**square(7 + 6, 3, 10, 10, 0, 12), "id": 0})
        categories = [{"id": identity, "name": str(identity)} for identity in (90, 1, 3)]
        written[part] = {"images": pictures, "annotations": objects, "categories": categories}
        (folder / "annotations" / f"instances_{part}.json").write_text(json.dumps(written[part]))
    return written


def square(picture: int, category: int, left: int, top: int, width: int, height: int) -> dict:
    """Return the annotation of a rectangle."""
    corners = [left, top, left + width, top, left + width, top + height, left, top + height]
    box = [left, top, width, height]
    return {"image_id": picture, "category_id": category, "bbox": box, "iscrowd": 0, "segmentation": [corners]}


def crowd(picture: int, height: int, width: int) -> dict:
    """Return the annotation of a crowd in the first two columns of a picture, in run lengths."""
    lengths = {"counts": [0, 2 * height, (width - 2) * height], "size": [height, width]}
    box = [0, 0, 2, height]
    return {"image_id": picture, "category_id": 3, "bbox": box, "iscrowd": 1, "segmentation": lengths}


SENTENCES = (
    ("Ein Hund läuft über die Wiese.", "A dog runs across the meadow."),
    ("Zwei Männer stehen vor einem Haus.", "Two men stand in front of a house."),
    ("Ein Kind spielt mit einem Ball.", "A child plays with a ball."),
    ("Eine Frau liest ein Buch.", "A woman reads a book."),
    ("Drei Hunde schlafen.", "Three dogs sleep."),
)


def multi30k(folder: Path, *, zipped: bool = False, test: str = "test2016", count: int = 16) -> None:
    """Write `count` pairs for training, and four each as "val" and as `test`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, first, many in (("train", 0, count), ("val", 1, 4), (test, 2, 4)):
        pairs = [SENTENCES[(first + index) % len(SENTENCES)] for index in range(many)]
        for language, lines in zip(("de", "en"), zip(*pairs, strict=True), strict=True):
            content = "".join(f"{line}\n" for line in lines).encode()
            path = folder / f"{name}.{language}{'.gz' * zipped}"
            path.write_bytes(gzip.compress(content) if zipped else content)


CONTEXT = "The river Elbe rises in the Giant Mountains and flows through Hamburg to the North Sea. It is 1,094 km long."
ANSWERS = (
    ("Where does the Elbe rise?", ("the Giant Mountains", "Giant Mountains")),
    ("Which city does it flow through?", ("Hamburg",)),
    ("How long is the Elbe?", ("1,094 km",)),
    ("Where does it flow to?", ("the North Sea", "North Sea")),
)


def squad(folder: Path, count: int = 16) -> None:
    """Write `count` questions for training, with one answer each, and four for development."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, many in (("train", count), ("dev", len(ANSWERS))):
        paragraphs = []
        for number in range(many):
            text, answers = ANSWERS[number % len(ANSWERS)]
            context = f"{'A sentence before it. ' * (number // len(ANSWERS))}{CONTEXT}"
            listed = [{"answer_start": context.index(each), "text": each} for each in answers]
            questions = [
                {"id": f"{name}{number}", "question": text, "answers": listed[: 1 if name == "train" else None]}
            ]
            paragraphs.append({"context": context, "qas": questions})
        content = {"version": "1.1", "data": [{"title": "Elbe", "paragraphs": paragraphs}]}
        (folder / f"{name}-v1.1.json").write_text(json.dumps(content))
