"""Tiny data sets in the layouts in which the real ones are distributed."""

import gzip
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
