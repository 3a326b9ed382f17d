"""BERT's pretraining: masked tokens, and whether a text continues another. Needs transformers and tokenizers."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy

from natgrad.tasks import applications, vocabulary
from natgrad.tasks.applications.language import TransformerSize
from natgrad.tasks.base import Evaluator, Samples
from natgrad.tasks.corpus import Array, Corpus
from natgrad.tasks.evaluators import gather
from natgrad.tasks.language import MOST_TESTED, Language, transformers
from natgrad.tasks.vocabulary import Tokenizer

Tensors = dict[str, Tensor]

IGNORED = -100  # the target of a place that is not masked

_ADDED = (vocabulary.PAD, vocabulary.FIRST, vocabulary.LAST, vocabulary.MASK)
_SHARE = 0.15  # of the tokens are masked
_REPLACED, _RANDOM = 0.8, 0.1  # of these become [MASK], and others a random token; the rest stay


def spans(corpus: Corpus, documents: range, room: int) -> Array:
    """Cut documents into spans of segments with at most `room` tokens, or of one segment.

    Returns:
        The first segment of each span, and the one after its last, int64 [N, 2].
    """
    found = array("q")
    for document in documents:
        first, end = map(int, corpus.documents[document : document + 2])
        ends = corpus.segments[first : end + 1].tolist()
        at = 0
        while at < end - first:
            after = max(bisect_right(ends, ends[at] + room, at + 1) - 1, at + 1)
            found.extend((first + at, first + after))
            at = after
    return np.frombuffer(found, np.int64).reshape(-1, 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs:
    """Pairs of texts with masked tokens, drawn by seed, epoch and sample.

    Attributes:
        corpus: The text.
        documents: The documents that random texts are from.
        spans: The segments of each sample, int64 [N, 2].
        length: Tokens of a sample.
        most_masked: The most masked tokens of a sample.
        draw: Seed and epoch.
    """

    corpus: Corpus
    documents: range
    spans: Array
    length: int
    most_masked: int
    draw: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.spans)

    def __getitem__(self, indices: list[int] | slice) -> tuple[Tensors, Tensors]:
        """Return inputs and targets.

        Inputs are those of BERT, [B, T], and `masked`, the positions of the masked tokens, [B, M]. Targets are these
        tokens, `words` [B, M], -100 where a sample has fewer, and `next`, [B], 1 if the second text is a random one.
        """
        chosen = range(len(self))[indices] if isinstance(indices, slice) else indices
        samples = [self._sample(index) for index in chosen]
        columns = [torch.from_numpy(np.stack(column)) for column in zip(*samples, strict=True)]
        tokens, kinds, seen, masked, words, following = columns
        inputs = {
            "input_ids": tokens,
            "token_type_ids": kinds,
            "attention_mask": seen,
            "position_ids": torch.arange(self.length).expand(len(tokens), -1),
            "masked": masked,
        }
        return inputs, {"words": words, "next": following}

    @property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary."""
        return self.corpus.tokenizer

    @property
    def room(self) -> int:
        """The most tokens of both texts of a sample."""
        return self.length - 3

    def augmented(self, seed: int, epoch: int) -> Pairs:
        """Return the samples of an epoch."""
        return replace(self, draw=(seed, epoch))

    def _sample(self, index: int) -> tuple[Array, ...]:
        """Return tokens, types and attention [T], positions and words of masked tokens [M], and the second text's."""
        random = np.random.default_rng((*self.draw, index))
        one, other, is_random = self._texts(index, random)
        padding, first, last, mask = np.array([self.tokenizer.token_to_id(name) for name in _ADDED])
        tokens = np.full(self.length, padding)
        used = len(one) + len(other) + 3
        tokens[:used] = np.concatenate(([first], one, [last], other, [last]))
        kinds, seen = np.zeros(self.length, np.int64), np.zeros(self.length, np.int64)
        kinds[len(one) + 2 : used], seen[:used] = 1, 1

        maskable = np.concatenate((np.arange(1, len(one) + 1), np.arange(len(one) + 2, used - 1)))
        count = min(self.most_masked, max(1, round(_SHARE * len(maskable))))
        masked, words = np.zeros(self.most_masked, np.int64), np.full(self.most_masked, IGNORED)
        masked[:count] = np.sort(random.permutation(maskable)[:count])
        words[:count] = tokens[masked[:count]]
        drawn, others = random.random(count), random.integers(self.tokenizer.get_vocab_size(), size=count)
        changed = np.where(drawn < _REPLACED + _RANDOM, others, words[:count])
        tokens[masked[:count]] = np.where(drawn < _REPLACED, mask, changed)
        return tokens, kinds, seen, masked, words, np.array(is_random, np.int64)

    def _texts(self, index: int, random: np.random.Generator) -> tuple[Array, Array, bool]:
        """Return two texts, the second of which continues the first or is, in half of the cases, a random one."""
        first, end = map(int, self.spans[index])
        is_single = end - first == 1
        is_random = is_single or bool(random.random() < 0.5)
        cut = end if is_single else int(random.integers(first + 1, end))
        one = self._tokens(first, cut)
        if not is_random:
            return one, self._tokens(cut, end), False
        own = int(np.searchsorted(self.corpus.documents, first, side="right")) - 1
        document = int(random.integers(self.documents.start, self.documents.stop - 1))
        begin, stop = map(int, self.corpus.documents[(at := document + (document >= own)) : at + 2])
        start = int(random.integers(begin, stop))
        limit = self.corpus.segments[start] + max(self.room - len(one), 1)
        after = int(np.searchsorted(self.corpus.segments[: stop + 1], limit, side="right")) - 1
        one, other = _fitted(one, self._tokens(start, max(after, start + 1)), self.room, random)
        return one, other, True

    def _tokens(self, first: int, end: int) -> Array:
        """Return the tokens of segments."""
        start, stop = self.corpus.segments[first], self.corpus.segments[end]
        return self.corpus.tokens[start:stop].astype(np.int64)


def _fitted(one: Array, other: Array, room: int, random: np.random.Generator) -> list[Array]:
    """Return two texts that fit into `room`; the longer is cut first, each at its beginning or its end."""
    kept = min(len(one), max(room - len(other), room // 2))
    parts = []
    for text, size in ((one, kept), (other, min(len(other), room - kept))):
        start = int(random.integers(2)) * (len(text) - size)
        parts.append(text[start : start + size])
    return parts


class Model(transformers.BertForPreTraining):  # type: ignore[misc]
    """BERT with both heads, called with a batch of inputs; the words' head sees the masked positions only."""

    def forward(self, inputs: Tensors) -> Tensors:
        """Return the logits `words` [B, M, V] of the masked tokens, and `next` [B, 2] of the second text."""
        names = ("input_ids", "token_type_ids", "attention_mask", "position_ids")
        seen = self.bert(**{name: inputs[name] for name in names})
        hidden = seen.last_hidden_state
        places = inputs["masked"].unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        words, following = self.cls(hidden.gather(1, places), seen.pooler_output)
        return {"words": words, "next": following}


def configuration(size: TransformerSize, entries: int) -> transformers.BertConfig:
    """Return the configuration of BERT with so many entries in its vocabulary."""
    return transformers.BertConfig(
        vocab_size=entries,
        num_hidden_layers=size.layers,
        hidden_size=size.width,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
    )


def build(size: TransformerSize, entries: int) -> Model:
    """Return BERT with so many entries in its vocabulary."""
    return Model(configuration(size, entries))


class MaskedAccuracy(MulticlassAccuracy):  # type: ignore[misc]
    """The share of masked tokens that have the largest logit."""

    def __init__(self, entries: int) -> None:
        super().__init__(num_classes=entries, average="micro", ignore_index=IGNORED, dist_sync_fn=gather)

    def update(self, outputs: Tensors, targets: Tensors) -> None:
        """Add a batch."""
        super().update(outputs["words"].flatten(0, 1), targets["words"].flatten())


@dataclass(frozen=True, kw_only=True)
class Bert(applications.Bert, Language):
    """The data, model and loss of the task."""

    def load(self) -> tuple[Samples, Samples]:
        """Return pairs of texts with masked tokens; at most 10,000 for testing, evenly spaced."""
        corpus = self.corpus(word_pieces=True)
        parts = []
        for documents in corpus.parts():
            found = spans(corpus, documents, self.length - 3)
            parts.append(
                Pairs(
                    corpus=corpus,
                    documents=documents,
                    spans=found,
                    length=self.length,
                    most_masked=self.most_masked,
                )
            )
        train, test = parts
        chosen = np.linspace(0, len(test) - 1, min(len(test), MOST_TESTED)).astype(np.int64)
        return train, replace(test, spans=test.spans[chosen])

    def augmented(self, train: Any, *, seed: int, epoch: int) -> Samples:
        """Return the training samples of an epoch, with other pairs and masks in each."""
        changed: Samples = train.augmented(seed, epoch)
        return changed

    def model(self) -> nn.Module:
        """Build BERT with both heads."""
        return build(self.dimensions, self.tokenizer.get_vocab_size())

    def loss(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """Return the mean cross-entropy of the masked tokens plus that of the second texts."""
        words = functional.cross_entropy(
            outputs["words"].flatten(0, 1), targets["words"].flatten(), ignore_index=IGNORED
        )
        return words + functional.cross_entropy(outputs["next"], targets["next"])

    def count(self, targets: Tensors) -> dict[str, float]:
        """Return the number of masked tokens, for the layers that see them alone."""
        return {"cls.predictions.*": int((targets["words"] != IGNORED).sum())}

    def evaluator(self) -> Evaluator:
        """Return a metric of the accuracy of the masked tokens."""
        metric: Evaluator = MaskedAccuracy(self.tokenizer.get_vocab_size())
        return metric
