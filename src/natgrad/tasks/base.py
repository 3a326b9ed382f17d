"""The base class of tasks: data, model, loss and metric."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

from natgrad.tasks.facts import Facts

if TYPE_CHECKING:  # listing tasks must not import torch
    from torch import Tensor, nn
    from torch.utils.data import TensorDataset


class Evaluator(Protocol):
    """The part of `torchmetrics.Metric` that an evaluation uses; `compute` combines the values of all ranks."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add one batch."""

    def compute(self) -> Tensor:
        """Return the metric of all batches so far, a scalar."""

    def reset(self) -> None:
        """Forget all batches."""


@dataclass(frozen=True, kw_only=True)
class Task(Facts, ABC):
    """A problem with real data that needs no download.

    Equal tasks have equal data; only `model` draws from torch's global generator, which the caller seeds.
    """

    def datasets(self) -> tuple[TensorDataset, TensorDataset]:
        """Return (train, test) data sets of pairs (input, target), loaded once per process.

        Raises:
            NatgradError: The installed data source lacks data that the task needs.
        """
        return _loaded(self)

    @abstractmethod
    def load(self) -> tuple[TensorDataset, TensorDataset]:
        """Build the data sets of `datasets`."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Build the model, with parameters from torch's global generator."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the training loss of a batch, a scalar averaged according to `reduction`."""

    @abstractmethod
    def evaluator(self) -> Evaluator:
        """Return a new accumulator of `metric`."""


@cache
def _loaded(task: Task) -> tuple[TensorDataset, TensorDataset]:
    return task.load()
