"""Tiny data sets in the layouts in which the real ones are distributed."""

import gzip
import pickle
import struct
from pathlib import Path
from typing import ClassVar

import numpy as np

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
