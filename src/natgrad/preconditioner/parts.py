"""The components of a preconditioner, shared by the phases of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from natgrad.capture import Capture
from natgrad.capture.labels import LabelSampler
from natgrad.capture.model_hooks import Hooks
from natgrad.capture.reductions import Count, Reductions
from natgrad.damping import Control
from natgrad.distributed import Communicator
from natgrad.layers import Layer
from natgrad.linalg.precision import Precision
from natgrad.preconditioner.counters import StepCounters
from natgrad.preconditioner.epochs import Epochs
from natgrad.preconditioner.gradients.clip import Clip
from natgrad.preconditioner.gradients.reduction import Scaling
from natgrad.preconditioner.gradients.written import WrittenGradients
from natgrad.preconditioner.guard.guard import FailureCounters
from natgrad.preconditioner.guard.inspection import Inspection
from natgrad.preconditioner.renewal import Background, RefreshScheduler
from natgrad.preconditioner.second_pass import SecondPass, check_damping
from natgrad.preconditioner.structure import Structure
from natgrad.refresh import RefreshRule
from natgrad.state.block_group import BlockGroup


@dataclass(kw_only=True)
class Parts:
    """The components of a `natgrad.Preconditioner`.

    Attributes:
        model: The model as the user calls it.
        root: The model without wrappers.
        structure: The covered layers, their blocks and their ranks.
        runtime: Sends messages.
        hooks: The hooks on the layers.
        capture: Collects statistics from what the hooks report.
        reductions: The reduction of the loss for each layer.
        scaling: How the loss is scaled.
        damping: The damping of each step.
        refresh: The refresh rule.
        scheduler: Applies the rule.
        background: Decompositions in the background.
        clip: The KL clip.
        given: The gradients that the last step wrote.
        second: The second pass over a batch.
        sampler: Draws labels.
        watch: Counts failures.
        inspection: Finds layers that are used in unexpected ways.
        progress: Counts steps.
        epochs: The epochs, for HyLo.
        precision: The dtypes.
        reduces: Whether natgrad averages the gradients over the ranks.
        seed: The seed of all random numbers.
    """

    model: nn.Module
    root: nn.Module
    structure: Structure
    runtime: Communicator
    hooks: Hooks
    capture: Capture
    reductions: Reductions
    scaling: Scaling
    damping: Control
    refresh: RefreshRule
    scheduler: RefreshScheduler
    background: Background
    clip: Clip
    given: WrittenGradients
    second: SecondPass
    sampler: LabelSampler
    watch: FailureCounters
    inspection: Inspection
    progress: StepCounters
    epochs: Epochs
    precision: Precision
    reduces: bool
    seed: int

    @property
    def groups(self) -> list[BlockGroup]:
        """The groups of blocks."""
        return self.structure.groups

    @property
    def device(self) -> torch.device | None:
        """The device of the first parameter. None: the model has no parameters."""
        return next((parameter.device for parameter in self.root.parameters()), None)

    @property
    def summed(self) -> list[BlockGroup]:
        """The groups whose statistics are summed."""
        return [group for group in self.groups if group.statistics]

    @property
    def gathered(self) -> list[BlockGroup]:
        """The groups whose statistics are gathered."""
        return [group for group in self.groups if group.gathered]

    @property
    def shares_work(self) -> bool:
        """Whether ranks are workers of some layers only, and exchange preconditioned gradients."""
        return self.structure.plan.columns > 1

    @property
    def renews_in_background(self) -> bool:
        """Whether decompositions run in the background. The first ones never do."""
        return self.structure.plan.placement.rule.renews_in_background and self.progress.last_inverses is not None

    def agreed(self, flag: bool) -> bool:
        """Return `flag` of any rank if ranks are workers of some layers only, else that of this rank."""
        return self.runtime.any(flag) if self.shares_work else flag

    def spent(self) -> float:
        """Return the seconds of preconditioning so far."""
        return sum(self.progress.seconds.values()) + self.capture.seconds

    def damping_now(self) -> float:
        """Return γ of the next step.

        Raises:
            ValueError: if a schedule returns a value that is not allowed.
        """
        damping = self.damping.now(self.progress.step)
        check_damping([(one.curvature, one.factor) for one in self.groups if one.replayed_statistics], damping)
        return damping

    def gains(self, count: Count | None) -> tuple[Mapping[str, float], float | Tensor]:
        """Return the part of each layer's samples or tokens that counts, and the factor of captured gradients."""
        return self.capture.shares(count), self.scaling.of_captured(len(self.capture.backwards))

    def layer_scale(self, layer: Layer) -> float | Tensor:
        """Return the factor that makes a layer's gradient that of its mean loss, in addition to the common scale."""
        of_sum = self.scaling.of_sum
        return of_sum if of_sum is not None and self.reductions.of(layer.name) == "sum" else 1.0
