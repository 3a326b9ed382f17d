"""Labelled pictures in tar files, in the layout of webdataset: `NAME.jpg` and `NAME.cls` for each of them."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from natgrad.tasks.base import DataError
from natgrad.tasks.pictures import Picture

_PICTURES = ("bmp", "jpeg", "jpg", "png", "ppm", "webp")
_BLOCK = 512  # bytes; a tar file ends with blocks of zeros


def read(paths: Iterable[Path], classes: int) -> list[Picture]:
    """Return the pictures of tar files, in the order of the files. The files' headers and labels are read.

    Raises:
        DataError: A file is no tar file, compressed, cut or without pictures, or a label is missing or no class.
    """
    return [picture for path in paths for picture in _read(path, classes)]


def _read(path: Path, classes: int) -> list[Picture]:
    found: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                name, _, kind = _split(member.name)
                if kind in _PICTURES and member.isfile():
                    found[name] = member
                elif kind == "cls" and member.isfile():
                    labels[name] = _label(path, member.name, tar.extractfile(member), classes)
            end = tar.offset
        with path.open("rb") as file:
            file.seek(end)
            if file.read(_BLOCK) != bytes(_BLOCK):
                raise DataError(f"{path} is cut or damaged: at byte {end} it has neither a member nor its end")
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{path} is no tar file, or it is compressed, cut or damaged: {error}") from error
    if not found:
        raise DataError(f"{path} has no pictures: they are members NAME.KIND with KIND one of {', '.join(_PICTURES)}")
    for name, member in found.items():
        if name not in labels:
            raise DataError(f"{path}: {member.name} has no label {name}.cls")
    return [
        Picture(str(path), labels[name], member.name, member.offset_data, member.size) for name, member in found.items()
    ]


def _split(member: str) -> tuple[str, str, str]:
    """Return the name of a sample, which has no dots outside of its folder, a dot, and what the member holds."""
    folder, slash, file = member.rpartition("/")
    name, dot, kind = file.partition(".")
    return folder + slash + name, dot, kind.lower()


def _label(path: Path, member: str, file: IO[bytes] | None, classes: int) -> int:
    text = file.read(20).decode("latin1") if file is not None else ""
    if not text.strip().isascii() or not text.strip().isdigit() or int(text) >= classes:
        raise DataError(f"{path}: {member} holds {text!r}, and a label is a whole number from 0 to {classes - 1}")
    return int(text)
