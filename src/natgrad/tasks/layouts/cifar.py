"""CIFAR-10 and CIFAR-100 as they are distributed: binary files, or batches that Python pickled."""

from __future__ import annotations

import codecs
import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from natgrad.tasks.base import DataError
from natgrad.tasks.layouts.folder import check_distinct, check_labels, find

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class _Layout:
    """The files of a version of a data set.

    Attributes:
        folder: The folder that its archive unpacks to.
        train: The training files.
        test: The test file.
    """

    folder: str
    train: tuple[str, ...]
    test: str

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, self.test)


@dataclass(frozen=True)
class _Cifar:
    """A data set.

    Attributes:
        title: Its name.
        labels: For each label before an image in a binary file its name in a pickled one and its number of classes; the
            last one is used.
        layouts: Its versions.
    """

    title: str
    labels: tuple[tuple[bytes, int], ...]
    layouts: tuple[_Layout, ...]


_CIFARS = {
    "cifar10": _Cifar(
        "CIFAR-10",
        ((b"labels", 10),),
        tuple(
            _Layout(folder, tuple(f"data_batch_{number}{end}" for number in range(1, 6)), f"test_batch{end}")
            for folder, end in (("cifar-10-batches-bin", ".bin"), ("cifar-10-batches-py", ""))
        ),
    ),
    "cifar100": _Cifar(
        "CIFAR-100",
        ((b"coarse_labels", 20), (b"fine_labels", 100)),
        (
            _Layout("cifar-100-binary", ("train.bin",), "test.bin"),
            _Layout("cifar-100-python", ("train",), "test"),
        ),
    ),
}


def read(name: str, folder: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Read "cifar10" or "cifar100".

    Args:
        name: The data set.
        folder: Its folder, or the one above.

    Returns:
        For training and testing: pixels, uint8 [N, 3, 32, 32], and labels, int64 [N].

    Raises:
        ValueError: There is no such folder.
        DataError: A file is missing, damaged or another than expected.
    """
    cifar = _CIFARS[name]
    found = [(layout, find(folder, [layout.folder], layout.files)) for layout in cifar.layouts]
    versions = [(layout, [place / file for file in layout.files]) for layout, place in found if place is not None]
    if not versions:
        raise DataError(_absent(cifar, folder))
    complete = [version for version in versions if all(path.is_file() for path in version[1])]
    layout, paths = (complete or versions)[0]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path} is missing: {cifar.title} has {', '.join(layout.files)}")
    is_binary = paths[0].suffix == ".bin"
    parts = {path: _read_binary(path, cifar) if is_binary else _read_pickle(path, cifar, layout) for path in paths}
    check_distinct({path: pixels for path, (pixels, _) in parts.items()})
    *train, test = parts.values()
    counts = {path: len(pixels) for path, (pixels, _) in list(parts.items())[:-1]}
    if len(set(counts.values())) > 1:
        least = min(counts, key=lambda path: counts[path])
        raise DataError(f"{least} has {counts[least]} images, and other training files have {max(counts.values())}")
    pixels, labels = (torch.cat(tensors) for tensors in zip(*train, strict=True))
    return (pixels, labels), test


def _absent(cifar: _Cifar, folder: Path) -> str:
    """Return that a folder lacks a data set, and which of the others it has."""
    expected = " or ".join(f"{layout.train[0]} (in {layout.folder})" for layout in cifar.layouts)
    text = f"{folder} has no {cifar.title}: expected {expected}, in the folder itself or below"
    for other in _CIFARS.values():
        if any(find(folder, [layout.folder], layout.files) for layout in other.layouts):
            text += f"; it has {other.title}"
    archives = sorted(path.name for path in folder.glob("cifar-*.tar.gz"))
    return f"{text}; unpack {archives[0]} first" if archives else text


def _read_binary(path: Path, cifar: _Cifar) -> tuple[Tensor, Tensor]:
    """Read records of one byte per label and 3072 bytes of an image."""
    before, content = len(cifar.labels), np.fromfile(path, dtype=np.uint8)
    record = before + _PIXELS
    if not len(content) or len(content) % record:
        raise DataError(
            f"{path} has {len(content)} bytes, and {cifar.title} {record} for each image: it is truncated, or another "
            "file"
        )
    records = torch.from_numpy(content.reshape(-1, record))
    for index, (name, classes) in enumerate(cifar.labels):
        check_labels(path, records[:, index], classes, f"{cifar.title} ({name.decode()})")
    return records[:, before:].reshape(-1, 3, 32, 32), records[:, before - 1].long()


def _read_pickle(path: Path, cifar: _Cifar, layout: _Layout) -> tuple[Tensor, Tensor]:
    """Read a dictionary with arrays of pixels and lists of labels."""
    name, classes = cifar.labels[-1]
    content = path.read_bytes()
    try:
        loaded = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
        batch = {_text(key): value for key, value in loaded.items()}
        labels = np.asarray(batch.get(name.decode()))
    except Exception as error:  # a damaged pickle raises anything
        raise DataError(f"{path} is not a batch of {cifar.title}: {type(error).__name__}: {error}") from error
    if not {"data", name.decode()} <= batch.keys():
        raise DataError(f"{path} has {', '.join(batch) or 'no entries'}, and {cifar.title} data and {name.decode()}")
    pixels = batch["data"]
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (_PIXELS,):
        shape = getattr(pixels, "shape", type(pixels).__name__)
        raise DataError(f"{path}: data is {shape}, and {cifar.title} has bytes [N, {_PIXELS}]")
    if labels.dtype.kind not in "iu" or labels.shape != (len(pixels),) or not len(pixels):
        raise DataError(f"{path} has {len(pixels)} images and labels {list(labels.shape)} of {labels.dtype}")
    check_labels(path, torch.from_numpy(labels.astype(np.int64)), classes, f"{cifar.title} ({name.decode()})")
    _check_title(path, batch.get("batch_label"), layout)
    # A copy: unpickled arrays cannot be written, which torch warns of.
    return torch.from_numpy(pixels.copy()).view(-1, 3, 32, 32), torch.from_numpy(labels.astype(np.int64))


def _check_title(path: Path, found: Any, layout: _Layout) -> None:
    """Check what a batch calls itself, such as b"training batch 2 of 5", against the name of its file.

    Raises:
        DataError: It is another batch.
    """
    number = f"training batch {layout.train.index(path.name) + 1}" if path.name in layout.train else "testing batch 1"
    total = len(layout.train) if path.name in layout.train else 1
    expected = f"{number} of {total}"
    if isinstance(found, (bytes, str)) and _text(found) != expected:
        raise DataError(f"{path} calls itself {_text(found)!r}, and should be {expected!r}")


def _text(key: Any) -> str:
    """Return a key of a pickled dictionary, bytes if Python 2 wrote it, as text."""
    return key.decode(errors="replace") if isinstance(key, bytes) else str(key)


class _PlainUnpickler(pickle.Unpickler):
    """Loads arrays and plain types only, so that a file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the functions that a pickled array names.

        Raises:
            UnpicklingError: It is another.
        """
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, and may have arrays and plain types only")


_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,
}
