"""Multi30k as it is distributed: a file for each language, with a sentence in each line, with or without gzip."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

from natgrad.errors import require
from natgrad.tasks.base import DataError
from natgrad.tasks.layouts.folder import report_left_out

_NAMES = {"train": ("train",), "val": ("val",), "test": ("test", "test2016", "test_2016_flickr", "flickr2016")}

Pair = tuple[str, str]


def read(folder: Path, languages: Sequence[str], split: str) -> tuple[list[Pair], list[Pair]]:
    """Read sentences and their translations.

    Args:
        folder: The folder of the files.
        languages: The ends of the names of both files, "de" and "en", sources first.
        split: The sentences to test on, "val" or "test".

    Returns:
        Pairs for training and testing. Pairs with an empty line are left out, with a warning that counts them.

    Raises:
        ValueError: There is no such folder.
        DataError: A file is missing, damaged or another than expected.
    """
    require(folder.is_dir(), "data", str(folder), "an existing folder")
    train, test = (_read_part(folder, languages, part) for part in ("train", split))
    if train == test:
        raise DataError(f"{folder}: the sentences of {split} are those of train, one of them is a copy")
    return train, test


def _read_part(folder: Path, languages: Sequence[str], part: str) -> list[Pair]:
    paths = _paths(folder, languages, part)
    sources, targets = (_read_lines(path) for path in paths)
    if len(sources) != len(targets):
        raise DataError(
            f"{paths[0]} has {len(sources)} lines, and {paths[1].name} {len(targets)}: line by line, one is the "
            "translation of the other"
        )
    if sources == targets:
        raise DataError(f"{paths[1]} has the same sentences as {paths[0].name}: one of them is a copy")
    pairs = [pair for pair in zip(sources, targets, strict=True) if all(pair)]
    report_left_out(paths[0], len(sources) - len(pairs), len(sources), "pairs of sentences, of which one is empty")
    return pairs


def _paths(folder: Path, languages: Sequence[str], part: str) -> list[Path]:
    """Return the files of both languages, under the first name that one of them has."""
    for name in _NAMES[part]:
        known = {language: [folder / f"{name}.{language}{end}" for end in ("", ".gz")] for language in languages}
        found = {language: next(filter(Path.is_file, paths), None) for language, paths in known.items()}
        if any(found.values()):
            for language, path in found.items():
                if path is None:
                    raise DataError(f"{known[language][0]} is missing: Multi30k has one for each language, also as .gz")
            return [path for path in found.values() if path is not None]
    expected = " or ".join(" and ".join(f"{name}.{language}" for language in languages) for name in _NAMES[part])
    raise DataError(f"{folder} has no {part} sentences of Multi30k: expected {expected}, also as .gz")


def _read_lines(path: Path) -> list[str]:
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged, or no text in UTF-8: {error}") from error
    lines = [line.strip() for line in text.removesuffix("\n").split("\n")]
    if not any(lines):
        raise DataError(f"{path} has no sentences")
    return lines
