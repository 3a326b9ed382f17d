"""Answers to questions by BERT: SQuAD 1.1 from a folder, or embedded documentation. Needs transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.text import SQuAD

from natgrad.tasks import applications, documentation, vocabulary
from natgrad.tasks.base import Evaluator, Samples
from natgrad.tasks.bert import configuration
from natgrad.tasks.evaluators import gather
from natgrad.tasks.language import transformers
from natgrad.tasks.layouts import squad
from natgrad.tasks.layouts.squad import Question
from natgrad.tasks.vocabulary import SubwordTask, Tokenizer

_LONGEST_QUESTION = 64  # tokens, as in Devlin et al. 2019
_LONGEST_ANSWER = 30
_AT_ONCE = 1000  # questions to turn into tokens


@dataclass(frozen=True, eq=False)
class Window:
    """A question and a part of its text, as tokens.

    Attributes:
        tokens: The tokens [T], int32.
        first: The first token of the text, which ends before the last token of the window.
        places: Where each token of the text begins and ends, in characters [tokens of the text, 2].
    """

    tokens: np.ndarray
    first: int
    places: np.ndarray

    def find(self, start: int, end: int) -> tuple[int, int]:
        """Return the first and last token of an answer; the first token of the window if it is not in the window."""
        begins, ends = self.places.T
        if not len(begins) or begins[0] > start or ends[-1] < end:
            return 0, 0
        return self.first + int(np.argmax(ends > start)), self.first + int(np.flatnonzero(begins < end)[-1])


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows with the places of the answers.

    Attributes:
        windows: The windows.
        answers: The first and last token of the answer in each; 0 where it has none.
    """

    windows: Sequence[Window]
    answers: Tensor

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.windows)

    def __getitem__(self, indices: list[int] | slice) -> tuple[dict[str, Tensor], Tensor]:
        """Return the inputs of the model for windows [B, T], and the tokens of the answers [B, 2]."""
        chosen = range(len(self))[indices] if isinstance(indices, slice) else indices
        return _inputs([self.windows[index] for index in chosen]), self.answers[indices]


@dataclass(frozen=True, eq=False)
class Questions:
    """Questions, each with all windows of its text.

    Attributes:
        questions: The questions.
        windows: The windows of each.
        tokenizer: The vocabulary.
    """

    questions: Sequence[Question]
    windows: Sequence[Sequence[Window]]
    tokenizer: Tokenizer

    def __len__(self) -> int:
        """Return the number of questions."""
        return len(self.questions)

    def __getitem__(self, indices: list[int] | slice) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Return the inputs of the model for all windows of some questions, and what decides on their answers.

        That is for each question the text "context", the accepted "answers", and "places" [windows, T, 2]: where each
        token of the text begins and ends, in characters; -1 for other tokens.
        """
        chosen = range(len(self))[indices] if isinstance(indices, slice) else indices
        windows = [window for index in chosen for window in self.windows[index]]
        longest = max(len(window.tokens) for window in windows)
        targets = []
        for index in chosen:
            places = np.full((len(self.windows[index]), longest, 2), -1)
            for row, window in zip(places, self.windows[index], strict=True):
                row[window.first : window.first + len(window.places)] = window.places
            question = self.questions[index]
            targets.append(
                {"context": question.context, "answers": question.answers, "places": torch.from_numpy(places)}
            )
        return _inputs(windows), targets


def _inputs(windows: Sequence[Window]) -> dict[str, Tensor]:
    """Return the arguments of BERT for windows, padded to the longest."""
    lengths = torch.tensor([len(window.tokens) for window in windows])
    firsts = torch.tensor([window.first for window in windows])
    positions = torch.arange(int(lengths.max())).expand(len(windows), -1)
    tokens = torch.zeros(positions.shape, dtype=torch.int64)
    for row, window in zip(tokens, windows, strict=True):
        row[: len(window.tokens)] = torch.from_numpy(window.tokens)
    mask = positions < lengths[:, None]
    return {
        "input_ids": tokens,
        "attention_mask": mask.long(),
        "token_type_ids": (mask & (positions >= firsts[:, None])).long(),
        "position_ids": positions.contiguous(),
    }


def cut(questions: Sequence[Question], tokenizer: Tokenizer, *, window: int, stride: int) -> Iterator[list[Window]]:
    """Yield the windows of each question.

    Args:
        questions: The questions.
        tokenizer: Turns text into tokens.
        window: The most tokens of a window. A question has at most a quarter of them, and 64.
        stride: Tokens of the text that two windows in a row share, at most half of `window`.
    """
    most = min(_LONGEST_QUESTION, window // 4)
    before, between = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    for start in range(0, len(questions), _AT_ONCE):
        part = questions[start : start + _AT_ONCE]
        contexts = list(dict.fromkeys(question.context for question in part))
        encoded = zip(contexts, tokenizer.encode_batch(contexts, add_special_tokens=False), strict=True)
        texts = {
            context: (np.array(text.ids, np.int32), np.array(text.offsets, np.int32).reshape(-1, 2))
            for context, text in encoded
        }
        asked = tokenizer.encode_batch([question.text for question in part], add_special_tokens=False)
        for question, words in zip(part, asked, strict=True):
            tokens, places = texts[question.context]
            head = [before, *words.ids[:most], between]
            room = window - len(head) - 1
            starts = range(0, max(1, len(tokens) - stride), room - stride)
            yield [
                Window(np.array([*head, *tokens[at : at + room], between], np.int32), len(head), places[at : at + room])
                for at in starts
            ]


class Model(transformers.BertForQuestionAnswering):  # type: ignore[misc]
    """BERT with a linear layer for the first and the last token of an answer."""

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Map the arguments of BERT for tokens [B, T] to logits of the first and the last token [B, T, 2].

        Those of padding are -∞, so that the loss does not depend on the length of a batch.
        """
        hidden = self.bert(**inputs).last_hidden_state
        padding = inputs["attention_mask"][..., None] == 0
        logits: Tensor = self.qa_outputs(hidden).masked_fill(padding, -torch.inf)
        return logits


class Answers(SQuAD):  # type: ignore[misc]
    """F1 or exact match of the best part of each text, in [0, 1], as SQuAD's own script computes them.

    The best part has the largest sum of the logits of its first and last token, over all windows of the text.

    Args:
        measure: "f1" or "exact-match".
    """

    def __init__(self, measure: str) -> None:
        super().__init__(dist_sync_fn=gather)
        self._result = measure.replace("-", "_")

    def update(self, outputs: Tensor, targets: list[dict[str, Any]]) -> None:
        """Add the logits [windows, T, 2] of all windows of some questions, and the targets of `Questions`."""
        parts = outputs.split([len(target["places"]) for target in targets])
        found = [best(logits, target["places"]) for logits, target in zip(parts, targets, strict=True)]
        super().update(
            [
                {"id": str(index), "prediction_text": target["context"][start:end]}
                for index, ((start, end), target) in enumerate(zip(found, targets, strict=True))
            ],
            [{"id": str(index), "answers": {"text": list(target["answers"])}} for index, target in enumerate(targets)],
        )

    def compute(self) -> Tensor:
        """Return the mean over the questions, a scalar."""
        percentage: Tensor = super().compute()[self._result]
        return percentage / 100


def best(logits: Tensor, places: Tensor) -> tuple[int, int]:
    """Return where the best answer begins and ends, in characters.

    Args:
        logits: Of the first and the last token, in all windows of a text [windows, T, 2].
        places: Where each token of the text begins and ends [windows, T, 2]; -1 for other tokens.
    """
    length = logits.shape[1]
    span = torch.ones(length, length, dtype=torch.bool).triu().tril(_LONGEST_ANSWER - 1)
    is_text = places[..., 0] >= 0
    allowed = span & is_text[:, :, None] & is_text[:, None, :]
    if not allowed.any():
        return 0, 0
    scores = logits[..., 0, None] + logits[:, None, :, 1]
    index = int(scores.masked_fill(~allowed, -torch.inf).argmax())
    window, first, last = index // length**2, index // length % length, index % length
    return int(places[window, first, 0]), int(places[window, last, 1])


@dataclass(frozen=True, kw_only=True)
class QuestionAnswering(applications.QuestionAnswering, SubwordTask):
    """The data, model and loss of the task."""

    def load(self) -> tuple[Samples, Samples]:
        """Return windows with the places of their answers for training, and questions with all their windows."""
        train, test = documentation.questions() if self.data is None else squad.read(Path(self.data))
        tokenizer = self._build_tokenizer(train)
        sizes = {"window": self.window_tokens, "stride": self.shared_tokens}
        windows, answers = [], []
        for question, found in zip(train, cut(train, tokenizer, **sizes), strict=True):
            windows += found
            end = question.start + len(question.answers[0])
            answers += [window.find(question.start, end) for window in found]
        return Windows(windows, torch.tensor(answers)), Questions(test, list(cut(test, tokenizer, **sizes)), tokenizer)

    def _build_tokenizer(self, train: Sequence[Question]) -> Tokenizer:
        if self.vocabulary is not None:
            return vocabulary.read(Path(self.vocabulary), vocabulary.BERT_SPECIAL)
        texts = list(dict.fromkeys(text for question in train for text in (question.context, question.text)))
        return vocabulary.train_word_pieces(texts, self.trained_vocabulary_size)

    def model(self) -> nn.Module:
        """Build BERT, which maps tokens [B, T] to logits of the first and last token of the answer [B, T, 2]."""
        entries = self.tokenizer.get_vocab_size()
        model: nn.Module = Model(configuration(applications.Bert.sizes[self.model_size], entries))
        return model

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy in nats, the mean over samples and over the first and the last token."""
        return functional.cross_entropy(outputs, targets)

    def evaluator(self) -> Evaluator:
        """Return a metric of F1 or exact match."""
        metric: Evaluator = Answers(self.measure)
        return metric
