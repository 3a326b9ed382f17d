"""The interface of damping rules that adapt γ during training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from natgrad.distributed import Communicator
from natgrad.state.block_group import BlockGroup

if TYPE_CHECKING:
    from natgrad.preconditioner.gradients.clip import Clip


class AdaptiveDamping(ABC):
    """The options of an adaptive rule. Several preconditioners may share them.

    Attributes:
        compares: Whether the rule compares steps with their quadratic model.
        sizes: Whether the rule needs the traces of the layers' Fisher blocks.
    """

    compares: bool = False
    sizes: bool = False

    @abstractmethod
    def begin(self) -> Adaptation:
        """Return the state of the rule at the start of training."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """The actual and the predicted change of the loss by a step.

    Attributes:
        change: L(θ + δ) - L(θ) on the same mini-batch.
        predicted: M(δ), the change predicted by the quadratic model.
    """

    change: float
    predicted: float

    @property
    def ratio(self) -> float:
        """The reduction ratio ``change / predicted``: 1 if the prediction was exact, less if the loss is higher.

        If an increase was predicted (by momentum), the ratio is ``1 - (change - predicted) / |predicted|``. nan if no
        change was predicted.
        """
        return 1 - (self.change - self.predicted) / abs(self.predicted) if self.predicted else nan


class Adaptation(ABC):
    """The state of a damping rule in one training.

    Attributes:
        gamma: γ, equal on all ranks.
        awaits_sizes: Whether `measure` must be called before the next refresh.
    """

    gamma: float
    awaits_sizes: bool = False

    def value(self, step: int) -> float:
        """Return γ in the step after `step` completed ones."""
        return self.gamma

    def tries(self, step: int) -> bool:
        """Return whether to compare the step after `step` completed ones with its quadratic model."""
        return False

    def measure(
        self,
        groups: Sequence[BlockGroup],
        runtime: Communicator,
        device: torch.device,
        clip: Clip,
        scale: float | Tensor,
    ) -> None:
        """Update the rule with a measurement before a refresh; collective.

        Args:
            groups: All layers with curvature.
            runtime: The ranks.
            device: The device of messages.
            clip: The KL clip of the step.
            scale: The factor that makes raw gradients those of the mean loss.
        """
        raise NotImplementedError

    def learn(self, outcome: StepOutcome) -> None:
        """Update the rule with the outcome of a compared step, which is equal on all ranks."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Return further numbers for `natgrad.Preconditioner.metrics`."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, float]:
        """Return the state as numbers."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned."""
