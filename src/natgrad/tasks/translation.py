"""Translated sentences: Multi30k from a folder, or embedded dates and numbers. Needs tokenizers and sacrebleu."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torchmetrics import Metric

from natgrad.errors import NatgradError
from natgrad.tasks import applications, numerals, vocabulary
from natgrad.tasks.base import DataError, Evaluator, Samples
from natgrad.tasks.evaluators import gather
from natgrad.tasks.layouts import multi30k
from natgrad.tasks.transformer import FIRST, LAST, PAD, Transformer
from natgrad.tasks.vocabulary import SubwordTask, Tokenizer

try:
    from sacrebleu.metrics.bleu import BLEU
except ImportError as error:
    raise NatgradError(
        f"translation needs sacrebleu, as installed by: pip install 'natgrad[language]' ({error})", "missing-package"
    ) from error

SPECIAL = ("<pad>", "<s>", "</s>")
"""The first three tokens of a vocabulary: `PAD`, `FIRST` and `LAST`."""

_EMBEDDED, _EMBEDDED_TEST = 6000, 100
_SIZES = {"tiny": {"width": 128, "heads": 4, "inner": 256}, "base": {"width": 512, "heads": 8, "inner": 2048}}
_SMOOTHING = 0.1

Pair = tuple[str, str]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Sentences with their translations, as tokens.

    Attributes:
        sources: The tokens of each sentence and the one after it.
        targets: The tokens of each translation between those before and after it.
    """

    sources: Sequence[Tensor]
    targets: Sequence[Tensor]

    def __len__(self) -> int:
        """Return the number of sentences."""
        return len(self.sources)

    def __getitem__(self, indices: list[int] | slice) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return sources [B, S] and the tokens before each target [B, T], and targets [B, T], padded."""
        chosen = _chosen(len(self), indices)
        targets = _padded([self.targets[index] for index in chosen])
        # The last token of a sentence has none after it; its place is padding in a longer batch.
        before = targets[:, :-1].masked_fill(targets[:, :-1] == LAST, PAD)
        return (_padded([self.sources[index] for index in chosen]), before), targets[:, 1:]


@dataclass(frozen=True, eq=False)
class Sources:
    """Sentences as tokens, with the text of their translations.

    Attributes:
        sources: The tokens of each sentence and the one after it.
        references: The translations.
        tokenizer: Turns text into tokens, and back.
    """

    sources: Sequence[Tensor]
    references: Sequence[str]
    tokenizer: Tokenizer

    def __len__(self) -> int:
        """Return the number of sentences."""
        return len(self.sources)

    def __getitem__(self, indices: list[int] | slice) -> tuple[Tensor, list[str]]:
        """Return sources [B, S], padded, and their translations."""
        chosen = _chosen(len(self), indices)
        return _padded([self.sources[index] for index in chosen]), [self.references[index] for index in chosen]


def _chosen(count: int, indices: list[int] | slice) -> Sequence[int]:
    return range(count)[indices] if isinstance(indices, slice) else indices


def _padded(sentences: list[Tensor]) -> Tensor:
    return pad_sequence(sentences, batch_first=True, padding_value=PAD)


class Bleu(Metric):  # type: ignore[misc]
    """BLEU of all translations together, in [0, 1].

    Args:
        tokenizer: Turns tokens into text.
    """

    statistics: Tensor

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(dist_sync_fn=gather)
        self._tokenizer = tokenizer
        # Equal and all n-grams by length, and the lengths of translations and references.
        self.add_state("statistics", torch.zeros(10, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: list[str]) -> None:
        """Add translations [B, T] and their references."""
        found = BLEU().corpus_score(self._tokenizer.decode_batch(outputs.tolist()), [targets])
        self.statistics += self.statistics.new_tensor([*found.counts, *found.totals, found.sys_len, found.ref_len])

    def compute(self) -> Tensor:
        """Return the score, a scalar."""
        *grams, outputs, references = self.statistics.long().tolist()
        found = BLEU.compute_bleu(grams[:4], grams[4:], outputs, references, smooth_method="exp")
        return torch.tensor(found.score / 100)


@dataclass(frozen=True, kw_only=True)
class Translation(applications.Translation, SubwordTask):
    """The data, model and loss of the task."""

    def load(self) -> tuple[Samples, Samples]:
        """Return pairs of sentences for training, and sentences with the text of their translations."""
        train, test = self._pairs()
        tokenizer = self._build_tokenizer(train)

        def encode(texts: Iterable[str]) -> list[list[int]]:
            return [each.ids for each in tokenizer.encode_batch(list(texts), add_special_tokens=False)]

        sources, targets = (encode(texts) for texts in zip(*train, strict=True))
        return (
            Pairs(
                [torch.tensor([*ids, LAST]) for ids in sources],
                [torch.tensor([FIRST, *ids, LAST]) for ids in targets],
            ),
            Sources(
                [torch.tensor([*ids, LAST]) for ids in encode(source for source, _ in test)],
                [target for _, target in test],
                tokenizer,
            ),
        )

    def _pairs(self) -> tuple[list[Pair], list[Pair]]:
        languages = self.direction.split("-")
        if self.data is not None:
            return multi30k.read(Path(self.data), languages, self.split)
        every = numerals.pairs(_EMBEDDED + _EMBEDDED_TEST, seed=0)
        if languages[0] == "en":
            every = [(english, german) for german, english in every]
        return every[:_EMBEDDED], every[_EMBEDDED:]

    def _build_tokenizer(self, train: list[Pair]) -> Tokenizer:
        if self.vocabulary is None:
            texts = [text for pair in train for text in pair]
            return vocabulary.train_byte_pairs(texts, self.trained_vocabulary_size, SPECIAL)
        tokenizer = vocabulary.read(Path(self.vocabulary), SPECIAL)
        found = [str(tokenizer.id_to_token(index)) for index in range(len(SPECIAL))]
        if found != list(SPECIAL):
            raise DataError(f"{self.vocabulary} begins with {', '.join(found)}, and must with {', '.join(SPECIAL)}")
        return tokenizer

    def model(self) -> nn.Module:
        """Build a Transformer, which maps sources and targets to logits, and sources alone to translations."""
        return Transformer(self.tokenizer.get_vocab_size(), **_SIZES[self.model_size])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy with label smoothing in nats, the mean over the tokens of the targets."""
        return functional.cross_entropy(
            outputs.flatten(0, 1), targets.flatten(), ignore_index=PAD, label_smoothing=_SMOOTHING
        )

    def count(self, targets: Tensor) -> int:
        """Return the number of tokens, without padding."""
        return int((targets != PAD).sum())

    def evaluator(self) -> Evaluator:
        """Return a metric of BLEU."""
        metric: Evaluator = Bleu(self.tokenizer)
        return metric
