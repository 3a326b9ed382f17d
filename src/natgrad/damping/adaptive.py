"""The interface of damping rules that adapt γ during training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan


class Adaptive(ABC):
    """The options of an adaptive rule. Several preconditioners may share them.

    Attributes:
        compares: Whether the rule compares steps with their quadratic model.
        sizes: Whether the rule needs the sizes of the layers' Fisher.
    """

    compares: bool = False
    sizes: bool = False

    @abstractmethod
    def begin(self) -> Adaptation:
        """Return the state of the rule at the start of training."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The actual and the predicted change of the loss by a step.

    Attributes:
        change: L(θ + δ) - L(θ), on the same mini-batch.
        predicted: M(δ) of the quadratic model.
    """

    change: float
    predicted: float

    @property
    def ratio(self) -> float:
        """The reduction ratio ``change / predicted``: 1 if the model was right, less if the loss ended higher.

        If an increase was predicted (momentum can cause that): ``1 - (change - predicted) / |predicted|``. nan if no
        change was predicted.
        """
        return 1 - (self.change - self.predicted) / abs(self.predicted) if self.predicted else nan


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The sizes of Fisher, gradient and parameters of layers with curvature before a renewal; equal on all ranks.

    Attributes:
        sizes: ``tr F / d`` of each layer with d parameters; 0 without statistics.
        coherence: ``‖∇‖² / tr F`` over all layers with known F and gradient, where ∇ is that of the mean loss; nan if
            there are no such layers.
        room: ``κ / ‖θ‖²``: the KL clip over the squared norm of the parameters; infinite if the clip is not a number.
        pace: ``lr² / κ`` with the learning rate that schedulers start from, for the mean loss. None: unknown.
    """

    sizes: Sequence[float]
    coherence: float
    room: float = inf
    pace: float | None = None


class Adaptation(ABC):
    """The state of a damping in one training.

    Attributes:
        gamma: γ, the same on all ranks.
        awaits_sizes: Whether a measurement is needed at the next renewal.
    """

    gamma: float
    awaits_sizes: bool = False

    def value(self, step: int) -> float:
        """Return γ of the step after `step` completed ones."""
        return self.gamma

    def tries(self, step: int) -> bool:
        """Return whether to compare the step after `step` completed ones with its quadratic model."""
        return False

    def measure(self, extent: Extent) -> None:
        """Update the rule with a measurement before a renewal."""
        raise NotImplementedError

    def learn(self, outcome: Outcome) -> None:
        """Update the rule with the outcome of a compared step, equal on all ranks."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Return further numbers for the user."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, float]:
        """Return the state as numbers."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned."""
