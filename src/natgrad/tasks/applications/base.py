"""What every application of the papers has: models and data sets by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import Self

from natgrad.errors import require
from natgrad.tasks.facts import Facts

_MOST_READERS = 64  # of a rank
_USUAL_READERS = 8


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model.

    Attributes:
        title: The model in a few words.
        epochs: The length of a run on data from a folder.
    """

    title: str
    epochs: int


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set.

    Attributes:
        title: The name of the data set.
        layout: The files in its folder, in a few words; empty for embedded data.
        embedded: The name of the embedded data of the same kind.
        epochs: The length of a run on embedded data.
    """

    title: str
    layout: str = ""
    embedded: str = ""
    epochs: int = 1


@dataclass(frozen=True, kw_only=True)
class Application(Facts):
    """A model of `models` on a data set of `sources`.

    Attributes:
        title: What is learned.
        models: The models by name.
        sources: The data sets by name.
        embedded: The embedded data by name.
        architecture: The name of the model.
        source: The name of the data set.
        data: The folder of the data set; None: embedded data of the same kind.
    """

    title: ClassVar[str]
    models: ClassVar[Mapping[str, Architecture]]
    sources: ClassVar[Mapping[str, Source]]
    embedded: ClassVar[Mapping[str, Source]]
    fixed: ClassVar[tuple[str, ...]] = ("architecture", "source")

    architecture: str
    source: str
    data: str | None = None

    def __post_init__(self) -> None:
        fits = self.data is None or (isinstance(self.data, str) and self.data)
        require(fits, "data", self.data, f"the path (a string) of a folder with {self.sources[self.source].title}")

    @classmethod
    def all(cls) -> list[Self]:
        """Return every model on every data set."""
        return [cls(architecture=model, source=source) for model in cls.models for source in cls.sources]

    @property
    def name(self) -> str:
        """MODEL-DATA."""
        return f"{self.architecture}-{self.source}"

    @property
    def data_set(self) -> Source:
        """The data set that the task reads: `source`, or the embedded data."""
        source = self.sources[self.source]
        return source if self.data is not None else self.embedded[source.embedded]

    @property
    def summary(self) -> str:
        """Data and model in one line."""
        return f"{self.data_set.title}, {self.models[self.architecture].title}"

    @property
    def epochs(self) -> int:
        """The paper's length of a run, or a short one on embedded data."""
        return self.data_set.epochs if self.data is None else self.models[self.architecture].epochs


@dataclass(frozen=True, kw_only=True)
class FileApplication(Application):
    """An application whose samples are read from a folder while it trains.

    Attributes:
        readers: Processes of each rank that read batches ahead; None: up to 8, by the number of CPUs.
    """

    readers: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.readers is not None:
            fits = type(self.readers) is int and 0 <= self.readers <= _MOST_READERS
            require(fits, "readers", self.readers, f"a whole number from 0 to {_MOST_READERS}")

    @property
    def reading_processes(self) -> int:
        """`readers`, or the CPUs of a rank, at most 8; 0 on embedded data."""
        if self.data is None:
            return 0
        known = hasattr(os, "sched_getaffinity")
        every = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
        cpus = every // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return min(max(cpus, 1), _USUAL_READERS) if self.readers is None else self.readers
