"""The face of rules that adapt γ to what a training shows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan


class Adaptive(ABC):
    """What a user chooses: options alone, which several preconditioners may share.

    Attributes:
        compares: Whether it compares steps with their quadratic model.
        sizes: Whether it goes by the sizes of the layers' Fisher.
    """

    compares: bool = False
    sizes: bool = False

    @abstractmethod
    def begin(self) -> Adaptation:
        """Return the rule at the start of a training."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a step was worth.

    Attributes:
        change: L(θ + δ) - L(θ), of one and the same mini-batch.
        predicted: M(δ), which the quadratic model told in advance.
    """

    change: float
    predicted: float

    @property
    def ratio(self) -> float:
        """The reduction ratio ``change / predicted``, 1 where the model was right, less where the loss ended higher.

        Where an increase was predicted, as momentum may bring about, the same in terms of the error:
        ``1 - (change - predicted) / |predicted|``. Not a number where nothing was to happen.
        """
        return 1 - (self.change - self.predicted) / abs(self.predicted) if self.predicted else nan


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How large Fisher, gradient and parameters are before a renewal, of layers with curvature; alike on all ranks.

    Attributes:
        sizes: ``tr F / d`` of each layer, of d parameters; 0 where there are no statistics.
        coherence: ``‖∇‖² / tr F`` of all layers whose F and gradient are known, ∇ being that of the mean loss; not a
            number if there are none.
        room: ``κ / ‖θ‖²``, the KL clip over the squared length of the parameters; infinite without a number as clip.
        pace: ``lr² / κ``, of the learning rate that schedulers begin from, for the mean loss; None without one.
    """

    sizes: Sequence[float]
    coherence: float
    room: float = inf
    pace: float | None = None


class Adaptation(ABC):
    """A rule in one training.

    Attributes:
        gamma: γ, the same on all ranks.
    """

    gamma: float

    def tries(self, step: int) -> bool:
        """Return whether the step after `step` completed ones is to be compared with its quadratic model."""
        return False

    @property
    def awaits_sizes(self) -> bool:
        """Whether the next renewal is to tell it how large the Fisher is."""
        return False

    def measure(self, extent: Extent) -> None:
        """Take in how large all is, before a renewal."""
        raise NotImplementedError

    @abstractmethod
    def learn(self, outcome: Outcome) -> None:
        """Take in what such a step was worth, alike on all ranks."""

    def metrics(self) -> dict[str, float]:
        """Return what a user may want to see beside γ."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, float]:
        """Return what a resumed training goes on from, as plain numbers."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned."""
