"""What every task says of itself: data, model, loss, metric, and the facts the preconditioner needs."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal, Protocol

from torch import Tensor, nn
from torch.utils.data import TensorDataset

from natgrad.errors import require


@dataclass(frozen=True, kw_only=True)
class Metric:
    """What a table shows of a task's test set."""

    name: str
    better: Literal["lower", "higher"]


class Evaluator(Protocol):
    """The part of `torchmetrics.Metric` that an evaluation needs; `compute` synchronises the ranks of the world."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take one batch in."""

    def compute(self) -> Tensor:
        """Return the metric of all batches so far, a scalar."""

    def reset(self) -> None:
        """Forget all batches."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A ready problem with real data that needs no download.

    A subclass states its facts as class variables; its dataclass fields are its options, each with a default. Equal
    tasks have equal data; only `model` draws from torch's global generator, which the caller seeds.

    Attributes:
        name: How `natgrad.tasks.get` knows the task.
        summary: Data and model in one line.
        likelihood: What the outputs parametrise, for the sampled Fisher.
        reduction: Whether `loss` averages over samples (`"mean"`) or over all their positions (`"tokens"`).
        metric: What the evaluator computes.
        batch_size: Global batch size that suits two CPU cores.
        image_classes: How many classes there are, where inputs are images [C, H, W]; None: they are something else.
        epochs: Passes over the training set after which a tuned first-order method has nearly settled.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    likelihood: ClassVar[Literal["categorical", "bernoulli", "gaussian"]]
    reduction: ClassVar[Literal["mean", "tokens"]] = "mean"
    metric: ClassVar[Metric]
    image_classes: ClassVar[int | None] = None
    batch_size: ClassVar[int]
    epochs: ClassVar[int]

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


def at_least(least: int, **options: object) -> None:
    """Check that options are whole numbers of at least `least`.

    Raises:
        ValueError: One of them is not; the message names it.
    """
    for name, value in options.items():
        require(type(value) is int and value >= least, name, value, f"a whole number of at least {least}")
