"""Plain text: a folder of text files, or WikiText's files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from natgrad.errors import require
from natgrad.tasks.base import DataError

_TITLE = re.compile("= [^=](.*[^=])? =")  # of an article; those of its sections have more signs


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """Lines of text in documents, read again at each iteration.

    Each file begins a document.

    Attributes:
        files: The files.
        blank_ends: Whether a document ends at a blank line.
        titles: Whether a document begins at a title of WikiText, " = Title = ".
    """

    files: Sequence[Path]
    blank_ends: bool = False
    titles: bool = False

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        """Yield the lines that are not blank, without their ends, and whether each begins a document.

        Raises:
            DataError: A file is not UTF-8.
        """
        for path in self.files:
            begins = True
            with path.open(encoding="utf-8") as file:
                try:
                    for line in file:
                        text = line.rstrip()
                        if not text:
                            begins = begins or self.blank_ends
                            continue
                        begins = begins or (self.titles and _TITLE.fullmatch(text.strip()) is not None)
                        yield text, begins
                        begins = False
                except UnicodeDecodeError as error:
                    raise DataError(f"{path} is not text in UTF-8: {error}") from error


def read(name: str, folder: Path) -> tuple[TextFiles, TextFiles]:
    """Return the text for training and that for testing of "wikitext", or of any text files.

    The latter are `*.txt`, with a blank line between documents. Without folders `train` and `test` all are for
    training.

    Raises:
        ValueError: There is no such folder.
        DataError: A file is missing.
    """
    require(folder.is_dir(), "data", str(folder), "an existing folder")
    if name == "wikitext":
        train, test = (TextFiles(files=[_wikitext(folder, part)], titles=True) for part in ("train", "valid"))
        return train, test
    parts = [folder / part for part in ("train", "test")]
    if not any(part.is_dir() for part in parts):
        return TextFiles(files=_texts(folder), blank_ends=True), TextFiles(files=())
    train, test = (TextFiles(files=_texts(part), blank_ends=True) for part in parts)
    return train, test


def _texts(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.txt"))
    if not found:
        raise DataError(f"{folder} has no text files (*.txt)")
    return found


def _wikitext(folder: Path, part: str) -> Path:
    """Return the file of a part, of words (`.tokens`) or of the raw text (`.raw`)."""
    found = [path for kind in ("tokens", "raw") if (path := folder / f"wiki.{part}.{kind}").is_file()]
    if not found:
        raise DataError(
            f"{folder / f'wiki.{part}.tokens'} is missing: WikiText has wiki.train.tokens and wiki.valid.tokens"
        )
    return found[0]
