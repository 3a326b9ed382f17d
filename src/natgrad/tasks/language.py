"""Text for language models: from a folder, or the standard library's sources."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from natgrad.errors import NatgradError
from natgrad.tasks import applications, text, vocabulary
from natgrad.tasks.corpus import Corpus, Preparation
from natgrad.tasks.layouts.text import TextFiles, read
from natgrad.tasks.vocabulary import SubwordTask

try:
    import transformers
except ImportError as error:
    raise NatgradError(
        f"tasks on text need transformers, as installed by: pip install 'natgrad[language]' ({error})",
        "missing-package",
    ) from error

__all__ = ["END", "MOST_TESTED", "Language", "transformers"]

END = "<|endoftext|>"
"""GPT-2's token before a document."""

MOST_TESTED = 10_000  # samples of a test set

_EVERY = 8  # one in so many of the training sources of the task `text` is read, and twice as many for testing
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def sentences(line: str) -> list[str]:
    """Return the sentences of a line: parts that end with a full stop, an exclamation or a question mark."""
    return [part for part in _SENTENCE.split(line.strip()) if part]


def whole(line: str) -> list[str]:
    """Return a line with its end."""
    return [f"{line}\n"]


@dataclass(frozen=True, kw_only=True)
class Language(applications.Language, SubwordTask):
    """The text of the task."""

    def corpus(self, *, word_pieces: bool) -> Corpus:
        """Return the text in sentences and BERT's word pieces, or in lines and GPT-2's byte pairs."""
        if self.data is None:
            files, others = text.sources()
            train, test = TextFiles(files=files[::_EVERY]), TextFiles(files=others[:: _EVERY // 2])
        else:
            train, test = read(self.source, Path(self.data))
        needed = vocabulary.BERT_SPECIAL if word_pieces else (END,)
        size = self.trained_vocabulary_size
        if self.vocabulary is not None:
            path = Path(self.vocabulary)
            known = vocabulary.read(path, needed)
            name, vocabulary_of = sha256(path.read_bytes()).hexdigest(), lambda segments: known
        elif word_pieces:
            name, vocabulary_of = f"{size} word pieces", partial(vocabulary.train_word_pieces, size=size)
        else:
            train_pairs: Any = partial(vocabulary.train_byte_pairs, size=size, special=needed)
            name, vocabulary_of = f"{size} byte pairs", train_pairs
        return Preparation(
            train=train,
            test=test,
            split=sentences if word_pieces else whole,
            vocabulary=vocabulary_of,
            opening="" if word_pieces else END,
            name=name,
        ).load(self.cache_folder)
