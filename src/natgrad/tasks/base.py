"""What every task is made of: data, model, loss and metric, beside its facts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

from natgrad.tasks.facts import Facts

if TYPE_CHECKING:  # whoever lists tasks does without torch
    from torch import Tensor, nn
    from torch.utils.data import TensorDataset


class Evaluator(Protocol):
    """The part of `torchmetrics.Metric` that an evaluation needs; `compute` synchronises the ranks of the world."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take one batch in."""

    def compute(self) -> Tensor:
        """Return the metric of all batches so far, a scalar."""

    def reset(self) -> None:
        """Forget all batches."""


@dataclass(frozen=True, kw_only=True)
class Task(Facts, ABC):
    """A ready problem with real data that needs no download.

    Equal tasks have equal data; only `model` draws from torch's global generator, which the caller seeds.
    """

    def datasets(self) -> tuple[TensorDataset, TensorDataset]:
        """Return (train, test) of pairs (input, target), loaded once a process.

        Raises:
            NatgradError: The installed source of the data lacks what the task reads.
        """
        return _loaded(self)

    @abstractmethod
    def load(self) -> tuple[TensorDataset, TensorDataset]:
        """Build what `datasets` returns."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Build the model, its parameters drawn from torch's global generator."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the training loss of a batch, a scalar averaged as `reduction` says."""

    @abstractmethod
    def evaluator(self) -> Evaluator:
        """Return a fresh accumulator of `metric`."""


@cache
def _loaded(task: Task) -> tuple[TensorDataset, TensorDataset]:
    return task.load()
