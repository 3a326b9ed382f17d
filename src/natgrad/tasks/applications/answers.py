"""Answers to questions on a text, and translation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from natgrad.errors import require
from natgrad.tasks.applications.base import Architecture, Source
from natgrad.tasks.applications.language import Bert, SubwordApplication
from natgrad.tasks.facts import Metric, Reduction

_POSITIONS = 512  # of BERT
_SHORTEST = 16  # tokens, a quarter of them for the question
_METRICS = {"f1": "F1", "exact-match": "exact match"}


@dataclass(frozen=True, kw_only=True)
class QuestionAnswering(SubwordApplication):
    """Answers to questions, each a part of a text.

    Attributes:
        window: Tokens that the model sees at once, of the question and of a part of its text; None: 96 on embedded
            data, else 384.
        stride: Tokens of the text that two windows in a row share; None: a third of `window`.
        measure: The metric, "f1" or "exact-match".
    """

    title: ClassVar[str] = "Answers to questions"
    models: ClassVar[Mapping[str, Architecture]] = {"bert": Architecture(title="BERT", epochs=3)}
    sources: ClassVar[Mapping[str, Source]] = {
        "squad": Source(title="SQuAD 1.1", layout="train-v1.1.json and dev-v1.1.json", embedded="documentation")
    }
    embedded: ClassVar[Mapping[str, Source]] = {"documentation": Source(title="embedded documentation", epochs=6)}
    sizes: ClassVar[Collection[str]] = tuple(Bert.sizes)
    usual_size: ClassVar[str] = "base"
    usual_vocabularies: ClassVar[tuple[int, int]] = (2000, 30522)
    likelihood: ClassVar[None] = None
    batch_size: ClassVar[int] = 32
    evaluation_batch: ClassVar[int] = 64
    outputs: ClassVar[tuple[str, ...]] = ("qa_outputs",)
    new_parameters: ClassVar[tuple[str, ...]] = ("qa_outputs.*",)

    window: int | None = None
    stride: int | None = None
    measure: str = "f1"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least, most in (("window", _SHORTEST, _POSITIONS), ("stride", 0, self.window_tokens // 2)):
            value = getattr(self, name)
            fits = value is None or (type(value) is int and least <= value <= most)
            require(fits, name, value, f"a whole number from {least} to {most}")
        require(self.measure in _METRICS, "measure", self.measure, f"one of {', '.join(_METRICS)}")

    @property
    def window_tokens(self) -> int:
        """Tokens that the model sees at once."""
        return self.window if type(self.window) is int else 96 if self.data is None else 384

    @property
    def shared_tokens(self) -> int:
        """Tokens of a text that two windows in a row share."""
        return self.window_tokens // 3 if self.stride is None else self.stride

    @property
    def metric(self) -> Metric:
        """The mean over the questions, in [0, 1]."""
        return Metric(name=_METRICS[self.measure], better="higher")


@dataclass(frozen=True, kw_only=True)
class Translation(SubwordApplication):
    """Translated sentences.

    Attributes:
        direction: "de-en" from German to English, or "en-de".
        split: The sentences that the model is evaluated on with a folder, "val" or "test".
    """

    title: ClassVar[str] = "Translation"
    # "Transformer Shallow" of Shallue et al. 2019, as in Zhang et al. 2022.
    models: ClassVar[Mapping[str, Architecture]] = {
        "transformer": Architecture(title="Transformer of two layers", epochs=200)
    }
    sources: ClassVar[Mapping[str, Source]] = {
        "multi30k": Source(
            title="Multi30k",
            layout="train, val and test sentences in .de and .en, with or without gzip",
            embedded="numerals",
        )
    }
    embedded: ClassVar[Mapping[str, Source]] = {"numerals": Source(title="embedded dates and numbers", epochs=5)}
    sizes: ClassVar[Collection[str]] = ("tiny", "base")
    usual_size: ClassVar[str] = "base"
    usual_vocabularies: ClassVar[tuple[int, int]] = (600, 10000)
    likelihood: ClassVar[None] = None
    reduction: ClassVar[Reduction] = "tokens"
    metric: ClassVar[Metric] = Metric(name="BLEU", better="higher")
    batch_size: ClassVar[int] = 128
    evaluation_batch: ClassVar[int] = 128

    direction: str = "de-en"
    split: str = "val"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("direction", ("de-en", "en-de")), ("split", ("val", "test"))):
            value = getattr(self, name)
            require(value in choices, name, value, f"one of {', '.join(choices)}")
