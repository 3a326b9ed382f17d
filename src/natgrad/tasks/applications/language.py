"""Language modelling."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from natgrad.errors import require
from natgrad.tasks.applications.base import Application, Architecture, Source
from natgrad.tasks.facts import Metric, Reduction, at_least

_LEAST_VOCABULARY = 300  # special tokens and 256 bytes
_PHASES = {1: (128, 20), 2: (512, 80)}


@dataclass(frozen=True, kw_only=True)
class TransformerSize:
    """The size of a transformer.

    Attributes:
        layers: Blocks.
        width: Features of a position.
        heads: Attention heads of a block.
    """

    layers: int
    width: int
    heads: int


@dataclass(frozen=True, kw_only=True)
class SubwordApplication(Application):
    """An application whose models read subwords.

    Attributes:
        size: The size of the model, one of `sizes`; None: "tiny" on embedded data, else `usual_size`.
        vocabulary: A file with the vocabulary; None: it is trained on the text for training.
        vocabulary_size: The number of tokens of a trained vocabulary; None: the first of `usual_vocabularies` on
            embedded data, else the second.
    """

    sizes: ClassVar[Collection[str]]
    usual_size: ClassVar[str]
    usual_vocabularies: ClassVar[tuple[int, int]]

    size: str | None = None
    vocabulary: str | None = None
    vocabulary_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.size is None or self.size in self.sizes, "size", self.size, f"one of {', '.join(self.sizes)}")
        fits = self.vocabulary is None or (isinstance(self.vocabulary, str) and self.vocabulary)
        require(fits, "vocabulary", self.vocabulary, "a path (a string)")
        if self.vocabulary_size is not None:
            at_least(_LEAST_VOCABULARY, vocabulary_size=self.vocabulary_size)
            allowed = "left out where vocabulary is given"
            require(self.vocabulary is None, "vocabulary_size", self.vocabulary_size, allowed)

    @property
    def model_size(self) -> str:
        """The size of the model."""
        return self.size or ("tiny" if self.data is None else self.usual_size)

    @property
    def trained_vocabulary_size(self) -> int:
        """The number of tokens of a trained vocabulary."""
        return self.vocabulary_size or self.usual_vocabularies[self.data is not None]


@dataclass(frozen=True, kw_only=True)
class Language(SubwordApplication):
    """Words of a text from others.

    Attributes:
        cache: The folder in which the tokens of a text in files are kept; None: `natgrad` in the user's cache folder.
    """

    sources: ClassVar[Mapping[str, Source]] = {
        "pretraining": Source(title="text files", layout="*.txt with a blank line between documents", embedded="text"),
        "wikitext": Source(title="WikiText", layout="wiki.train.tokens and wiki.valid.tokens", embedded="text"),
    }
    embedded: ClassVar[Mapping[str, Source]] = {"text": Source(title="embedded text", epochs=2)}
    sizes: ClassVar[Mapping[str, TransformerSize]]

    cache: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.cache is None or (isinstance(self.cache, str) and self.cache)
        require(fits, "cache", self.cache, "a path (a string)")

    @property
    def dimensions(self) -> TransformerSize:
        """The dimensions of the model."""
        return self.sizes[self.model_size]

    @property
    def cache_folder(self) -> Path | None:
        """The folder in which tokens are kept; None: those of embedded text are not."""
        if self.data is None:
            return None
        usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "natgrad")
        return usual if self.cache is None else Path(self.cache)


@dataclass(frozen=True, kw_only=True)
class Bert(Language):
    """Masked words, and whether a text continues another (Devlin et al. 2019).

    Attributes:
        size: "tiny", "base" or "large"; None: "tiny" on embedded text, else "large".
        vocabulary: A file with the vocabulary; None: it is trained on the text.
        vocabulary_size: The number of tokens of a trained vocabulary; None: 1024 on embedded text, else 30522.
        cache: The folder in which the tokens of a text in files are kept; None: `natgrad` in the user's cache folder.
        phase: 1: sequences of 128 tokens with at most 20 masked ones; 2: 512 with at most 80.
    """

    title: ClassVar[str] = "Masked words and next sentences"
    models: ClassVar[Mapping[str, Architecture]] = {"bert": Architecture(title="BERT", epochs=40)}
    sizes: ClassVar[Mapping[str, TransformerSize]] = {
        "tiny": TransformerSize(layers=2, width=128, heads=2),
        "base": TransformerSize(layers=12, width=768, heads=12),
        "large": TransformerSize(layers=24, width=1024, heads=16),
    }
    usual_size: ClassVar[str] = "large"
    usual_vocabularies: ClassVar[tuple[int, int]] = (1024, 30522)
    likelihood: ClassVar[None] = None
    reduction: ClassVar[Mapping[str, Reduction]] = {"cls.predictions.*": "tokens", "*": "mean"}
    # All but the table of words, which is the last layer, too.
    curvature_layers: ClassVar[tuple[str, ...]] = (
        "bert.embeddings.position_embeddings",
        "bert.embeddings.token_type_embeddings",
        "bert.embeddings.LayerNorm",
        "bert.encoder.*",
        "bert.pooler.*",
        "cls.predictions.transform.*",
        "cls.seq_relationship",
    )
    outputs: ClassVar[tuple[str, ...]] = ("cls.seq_relationship",)
    metric: ClassVar[Metric] = Metric(name="accuracy of masked words", better="higher")
    evaluation_batch: ClassVar[int] = 32

    phase: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(type(self.phase) is int and self.phase in _PHASES, "phase", self.phase, "1 or 2")

    @property
    def batch_size(self) -> int:
        """The paper's, or a small one on embedded text."""
        return 32 if self.data is None else 256

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return _PHASES[self.phase][0]

    @property
    def most_masked(self) -> int:
        """The most masked tokens of a sequence."""
        return _PHASES[self.phase][1]


@dataclass(frozen=True, kw_only=True)
class Gpt(Language):
    """The next word (Radford et al. 2019).

    Attributes:
        size: "tiny", "small", "medium", "large" or "xl"; None: "tiny" on embedded text, else "small".
        vocabulary: A file with the vocabulary; None: it is trained on the text.
        vocabulary_size: The number of tokens of a trained vocabulary; None: 1024 on embedded text, else 50257.
        cache: The folder in which the tokens of a text in files are kept; None: `natgrad` in the user's cache folder.
        context: Tokens of a sequence, at most 1024; None: 128 on embedded text, else 1024.
    """

    title: ClassVar[str] = "Next words"
    models: ClassVar[Mapping[str, Architecture]] = {"gpt": Architecture(title="GPT-2", epochs=10)}
    sizes: ClassVar[Mapping[str, TransformerSize]] = {
        "tiny": TransformerSize(layers=2, width=128, heads=2),
        "small": TransformerSize(layers=12, width=768, heads=12),
        "medium": TransformerSize(layers=24, width=1024, heads=16),
        "large": TransformerSize(layers=36, width=1280, heads=20),
        "xl": TransformerSize(layers=48, width=1600, heads=25),
    }
    usual_size: ClassVar[str] = "small"
    usual_vocabularies: ClassVar[tuple[int, int]] = (1024, 50257)
    positions: ClassVar[int] = 1024
    likelihood: ClassVar[Literal["categorical"]] = "categorical"
    reduction: ClassVar[Literal["tokens"]] = "tokens"
    # All but the table of words, which is the last layer, too.
    curvature_layers: ClassVar[tuple[str, ...]] = ("transformer.wpe", "transformer.h.*", "transformer.ln_f")
    metric: ClassVar[Metric] = Metric(name="perplexity", better="lower")
    evaluation_batch: ClassVar[int] = 4

    context: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context is not None:
            fits = type(self.context) is int and 1 <= self.context <= self.positions
            require(fits, "context", self.context, f"a whole number from 1 to {self.positions}")

    @property
    def batch_size(self) -> int:
        """A small one on embedded text."""
        return 16 if self.data is None else 32

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.context or (128 if self.data is None else self.positions)
