"""The base class of tasks: data, model, loss and metric."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

from natgrad.errors import NatgradError
from natgrad.tasks.facts import Facts

if TYPE_CHECKING:  # listing tasks must not import torch
    from torch import Tensor, nn

    from natgrad.capture.counts import Count
    from natgrad.tasks.batches import Batch


class DataError(NatgradError):
    """A file of a data set is missing, damaged or another than expected."""

    anchor = "data-sets"


class Evaluator(Protocol):
    """The part of `torchmetrics.Metric` that an evaluation uses; `compute` combines the values of all ranks."""

    def update(self, outputs: Batch, targets: Batch) -> None:
        """Add one batch."""

    def compute(self) -> Tensor:
        """Return the metric of all batches so far, a scalar."""

    def reset(self) -> None:
        """Forget all batches."""


class Samples(Protocol):
    """A data set that is read in whole batches, such as `torch.utils.data.TensorDataset`.

    For batches that are not tensors see `natgrad.tasks.batches`.
    """

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, indices: list[int] | slice) -> tuple[Batch, Batch]:
        """Return a batch of inputs and targets."""


@dataclass(frozen=True, kw_only=True)
class Task(Facts, ABC):
    """A problem with real data.

    Equal tasks have equal data; only `model` draws from torch's global generator, which the caller seeds.
    """

    def datasets(self) -> tuple[Samples, Samples]:
        """Return (train, test) data sets of pairs (input, target), loaded once per process.

        Raises:
            NatgradError: The installed data source or the folder lacks data that the task needs.
        """
        return _loaded(self)

    @abstractmethod
    def load(self) -> tuple[Samples, Samples]:
        """Build the data sets of `datasets`."""

    @property
    def reading_processes(self) -> int:
        """The number of processes of each rank that read batches ahead; 0: each batch is read when it is needed."""
        return 0

    def augmented(self, train: Samples, *, seed: int, epoch: int) -> Samples:
        """Return the training set for an epoch, changed at random by seed, epoch and sample; here unchanged."""
        return train

    def unreadable(self) -> list[str]:
        """Return the names of the samples that this process and its readers could not read; here none."""
        return []

    @abstractmethod
    def model(self) -> nn.Module:
        """Build the model, which is called with a batch of inputs, with parameters from torch's global generator."""

    def vocabulary_digest(self) -> str | None:
        """Return a digest of the vocabulary of a task on text; here None."""
        return None

    @abstractmethod
    def loss(self, outputs: Batch, targets: Batch) -> Tensor:
        """Return the training loss of a batch, a scalar averaged according to `reduction`."""

    def count(self, targets: Batch) -> Count | None:
        """Return the positions that count in the loss of a batch, as for `Preconditioner.step`; here all of them."""
        return None

    def mask(self, targets: Batch) -> Tensor | None:
        """Return which positions count, as for `Preconditioner.backward` if labels are sampled; here all of them."""
        return None

    def count_outputs(self, outputs: Batch) -> Mapping[str, float]:
        """Return the positions that count in the loss of one backward pass by patterns of layers.

        For a loss of which the model alone knows them; empty here, where `count` does.
        """
        return {}

    @abstractmethod
    def evaluator(self) -> Evaluator:
        """Return a new accumulator of `metric`."""


@cache
def _loaded(task: Task) -> tuple[Samples, Samples]:
    return task.load()
