"""Language modelling with GPT-2: the next token. Needs transformers and tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad.tasks import applications
from natgrad.tasks.applications.language import TransformerSize
from natgrad.tasks.base import DataError, Evaluator, Samples
from natgrad.tasks.evaluators import MeanLoss
from natgrad.tasks.language import MOST_TESTED, Language, transformers
from natgrad.tasks.vocabulary import Tokenizer

Inputs = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """Windows of a text, one after the other.

    Attributes:
        tokens: The text, [T].
        starts: The first token of each window, int64 [N].
        length: The tokens of a window.
        tokenizer: The vocabulary.
    """

    tokens: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    length: int
    tokenizer: Tokenizer

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.starts)

    def __getitem__(self, indices: list[int] | slice) -> tuple[Inputs, Tensor]:
        """Return tokens and their positions [B, T], and the tokens that follow [B, T]."""
        places = self.starts[indices][:, None] + np.arange(self.length + 1)
        tokens = torch.from_numpy(self.tokens[places].astype(np.int64))
        positions = torch.arange(self.length).expand(len(tokens), -1)
        return {"input_ids": tokens[:, :-1], "position_ids": positions}, tokens[:, 1:]


class Model(transformers.GPT2LMHeadModel):  # type: ignore[misc]
    """GPT-2, called with a batch of inputs."""

    def forward(self, inputs: Inputs) -> Tensor:
        """Return the logits of each next token, [B, T, V]."""
        logits: Tensor = super().forward(**inputs, use_cache=False).logits
        return logits


def build(size: TransformerSize, entries: int) -> Model:
    """Return GPT-2 with so many entries in its vocabulary."""
    configuration = transformers.GPT2Config(
        vocab_size=entries,
        n_positions=applications.Gpt.positions,
        n_layer=size.layers,
        n_embd=size.width,
        n_head=size.heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Model(configuration)


class Perplexity(MeanLoss):
    """The exponential of the mean loss over all batches. Finite where a probability is below float32's least."""

    def compute(self) -> Tensor:
        """Return the perplexity, a scalar."""
        mean: Tensor = super().compute()
        return mean.exp()


@dataclass(frozen=True, kw_only=True)
class Gpt(applications.Gpt, Language):
    """The data, model and loss of the task."""

    def load(self) -> tuple[Samples, Samples]:
        """Return windows of the text with the tokens that follow; at most 10,000 for testing, evenly spaced.

        Raises:
            DataError: The text for training or testing is shorter than a window.
        """
        corpus = self.corpus(word_pieces=False)
        parts: list[Any] = []
        for documents in corpus.parts():
            first, end = (int(corpus.segments[corpus.documents[at]]) for at in (documents.start, documents.stop))
            count = (end - first - 1) // self.length
            if count < 1:
                where, what = self.data or "the embedded text", "testing" if parts else "training"
                raise DataError(f"{where} has {end - first} tokens for {what}, and a window needs {self.length + 1}")
            parts.append(first + self.length * np.arange(count))
        train, test = parts
        test = test[np.linspace(0, len(test) - 1, min(len(test), MOST_TESTED)).astype(np.int64)]
        shared: Any = {
            "tokens": corpus.tokens,
            "length": self.length,
            "tokenizer": corpus.tokenizer,
        }
        return Windows(starts=train, **shared), Windows(starts=test, **shared)

    def model(self) -> nn.Module:
        """Build GPT-2, from tokens [B, T] to logits [B, T, V]."""
        return build(self.dimensions, self.tokenizer.get_vocab_size())

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy in nats, the mean over all positions."""
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def evaluator(self) -> Evaluator:
        """Return a metric of the perplexity."""
        return Perplexity(self.loss)
