"""Vocabularies of subwords: trained on text by `tokenizers`, the same in every process, or read from a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from natgrad.errors import NatgradError, require
from natgrad.tasks.base import DataError, Task

try:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
except ImportError as error:
    raise NatgradError(
        f"tasks on text need tokenizers, as installed by: pip install 'natgrad[language]' ({error})", "missing-package"
    ) from error

__all__ = ["BERT_SPECIAL", "SubwordTask", "Tokenizer", "read", "train_byte_pairs", "train_word_pieces"]

PAD, UNKNOWN, FIRST, LAST, MASK = BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""BERT's special tokens; a trained vocabulary begins with them."""

_LETTERS = 1000  # the most frequent characters, which are tokens of their own


def train_word_pieces(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a WordPiece vocabulary of lower-case text, as BERT's.

    Args:
        texts: The text, which is read twice.
        size: The number of tokens; more if the special tokens and the characters alone are more.
    """
    normalizer = normalizers.BertNormalizer(lowercase=True)
    frequent: Counter[str] = Counter()
    for text in texts:
        frequent.update(normalizer.normalize_str(text))
    letters = sorted(letter for letter, _ in frequent.most_common(_LETTERS) if not letter.isspace())
    pieces = [*BERT_SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = _word_pieces({})
    # The trainer numbers the pieces of one letter in another order in each process, unless they are special tokens.
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return _word_pieces(tokenizer.get_vocab())


def train_byte_pairs(texts: Iterable[str], size: int, special: Sequence[str]) -> Tokenizer:
    """Train a vocabulary of byte pairs, as GPT-2's.

    Args:
        texts: The text.
        size: The number of tokens; more if the special tokens and the 256 bytes alone are more.
        special: Special tokens, with which the vocabulary begins.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read(path: Path, special: Sequence[str]) -> Tokenizer:
    """Read a vocabulary: a JSON file of `tokenizers`, or a text file with one of BERT's lower-case tokens a line.

    Args:
        path: The file.
        special: The tokens that it must have.

    Raises:
        ValueError: There is no such file.
        DataError: The file is no vocabulary, a token is missing, or the tokens have other numbers.
    """
    require(path.is_file(), "vocabulary", str(path), "an existing file")
    try:
        if path.suffix == ".json":
            tokenizer = Tokenizer.from_file(str(path))
        else:
            tokens = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
            tokenizer = _word_pieces({token: index for index, token in enumerate(tokens)})
    except Exception as error:  # tokenizers raises no other class
        raise DataError(f"{path} is no vocabulary, a JSON file of tokenizers or one token a line: {error}") from error
    missing = [token for token in special if tokenizer.token_to_id(token) is None]
    if missing:
        raise DataError(f"{path} lacks the tokens {', '.join(missing)}")
    if PAD in special and tokenizer.token_to_id(PAD) != 0:  # transformers leaves the row of token 0 untrained
        raise DataError(f"{path} has {PAD} as token {tokenizer.token_to_id(PAD)}, and must have it as token 0")
    size = tokenizer.get_vocab_size()
    if sorted(tokenizer.get_vocab().values()) != [*range(size)]:
        raise DataError(f"{path} has {size} different tokens, and their numbers are not 0 to {size - 1}")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class SubwordTask(Task):
    """A task on subwords. Its test set has the vocabulary as `tokenizer`."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary."""
        test: Any = self.datasets()[1]
        tokenizer: Tokenizer = test.tokenizer
        return tokenizer

    def vocabulary_digest(self) -> str:
        """Return a digest of the tokens and their numbers."""
        return sha256(json.dumps(sorted(self.tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def _word_pieces(vocabulary: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([token for token in BERT_SPECIAL if token in vocabulary])
    return tokenizer
