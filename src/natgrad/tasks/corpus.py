"""Text as tokens in documents of segments, which are written to files once and mapped into memory."""

from __future__ import annotations

import fcntl
import json
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from natgrad.tasks.base import DataError
from natgrad.tasks.layouts.text import TextFiles

Array = np.ndarray[Any, Any]

_SEGMENTS = 10_000  # that are tokenised at once
_HELD_OUT = 100  # of so many documents one is for testing, if there is no text for that


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A text.

    Attributes:
        tokenizer: Its vocabulary.
        tokens: The tokens of all segments, [T].
        segments: The number of tokens before each segment and at the end, int64 [S + 1].
        documents: The number of segments before each document and at the end, int64 [D + 1].
        held_out: The first document for testing; the documents before it are for training.
    """

    tokenizer: Tokenizer
    tokens: Array
    segments: Array
    documents: Array
    held_out: int

    def parts(self) -> tuple[range, range]:
        """Return the documents for training and those for testing."""
        return range(self.held_out), range(self.held_out, len(self.documents) - 1)


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How text becomes tokens.

    Attributes:
        train: The text for training.
        test: The text for testing; without files it is the last hundredth of the documents, at least two.
        split: Returns the segments of a line.
        vocabulary: Returns the vocabulary, given or trained on the segments of `train`.
        opening: The token before each document; empty: none.
        name: Tells `split` and `vocabulary` from others.
    """

    train: TextFiles
    test: TextFiles
    split: Callable[[str], list[str]]
    vocabulary: Callable[[Iterable[str]], Tokenizer]
    opening: str = ""
    name: str

    def load(self, cache: Path | None) -> Corpus:
        """Return the text.

        Args:
            cache: The folder in which it is kept in a folder of its own, and is written if it is not yet there. None:
                it is not kept.

        Raises:
            DataError: The text has fewer than two documents for training or for testing, or a file is damaged.
        """
        if cache is None:
            with tempfile.TemporaryDirectory() as name:
                self._write(Path(name))
                return _read(Path(name))
        place = cache / self._key()
        if place.is_dir():
            return _read(place)
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(place.with_suffix(".lock")):
            if not place.is_dir():  # another process may have written it meanwhile
                print(f"tokenising the text, once, into {place} ...", file=sys.stderr, flush=True)
                with tempfile.TemporaryDirectory(dir=cache, prefix=f"{place.name}.") as name:
                    partial = Path(name, "partial")
                    partial.mkdir()
                    self._write(partial)
                    partial.rename(place)
        return _read(place)

    def _key(self) -> str:
        """Return a name that tells this text and vocabulary from others."""
        parts = [
            [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in part.files]
            for part in (self.train, self.test)
        ]
        described = [self.name, self.opening, self.train.titles, self.train.blank_ends, *parts]
        return sha256(json.dumps(described).encode()).hexdigest()[:16]

    def _write(self, place: Path) -> None:
        """Write the files of the text to a folder."""
        tokenizer = self.vocabulary(_Segments(self.train, self.split))
        opening: list[Any] = [tokenizer.token_to_id(self.opening)] if self.opening else []
        dtype = np.uint16 if tokenizer.get_vocab_size() <= np.iinfo(np.uint16).max else np.uint32
        lengths, documents, held_out = array("q"), array("q"), 0
        with (place / "tokens.bin").open("wb") as file:
            for part in (self.train, self.test):
                held_out, begins = len(documents), False
                segments = _Segments(part, self.split).with_beginnings()
                while batch := list(islice(segments, _SEGMENTS)):
                    encoded = tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
                    written: list[list[int]] = []
                    for tokens, (_, first) in zip(encoded, batch, strict=True):
                        begins = begins or first
                        if not tokens.ids:
                            continue
                        if begins:
                            documents.append(len(lengths))
                        written.append([*(opening if begins else []), *tokens.ids])
                        lengths.append(len(written[-1]))
                        begins = False
                    np.fromiter(chain.from_iterable(written), dtype).tofile(file)
        if not self.test.files:
            held_out = len(documents) - max(2, len(documents) // _HELD_OUT)
        if held_out < 2 or len(documents) - held_out < 2:
            where = self.train.files[0].parent
            raise DataError(
                f"{where} has {len(documents)} documents, {max(held_out, 0)} of them for training: at least two are "
                "needed for training and two for testing"
            )
        tokenizer.save(str(place / "vocabulary.json"))
        documents.append(len(lengths))
        np.save(place / "segments.npy", np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))
        np.save(place / "documents.npy", np.asarray(documents))
        (place / "corpus.json").write_text(json.dumps({"held_out": held_out, "dtype": np.dtype(dtype).name}))


def _read(place: Path) -> Corpus:
    """Return the text in a folder; its files stay readable if they are removed."""
    facts = json.loads((place / "corpus.json").read_text())
    return Corpus(
        tokenizer=Tokenizer.from_file(str(place / "vocabulary.json")),
        tokens=np.memmap(place / "tokens.bin", dtype=facts["dtype"], mode="r"),
        segments=np.load(place / "segments.npy", mmap_mode="r"),
        documents=np.load(place / "documents.npy", mmap_mode="r"),
        held_out=facts["held_out"],
    )


class _Segments:
    """The segments of a text, read again at each iteration."""

    def __init__(self, text: TextFiles, split: Callable[[str], list[str]]) -> None:
        self._text, self._split = text, split

    def __iter__(self) -> Iterator[str]:
        return (segment for segment, _ in self.with_beginnings())

    def with_beginnings(self) -> Iterator[tuple[str, bool]]:
        """Yield segments, and whether each begins a document."""
        for line, begins in self._text:
            for index, segment in enumerate(self._split(line)):
                yield segment, begins and index == 0


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock of a file."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
