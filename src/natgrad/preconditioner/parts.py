"""What the phases of a step share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from natgrad.capture import Capture
from natgrad.capture.labels import LabelSampler
from natgrad.capture.model_hooks import Hooks
from natgrad.capture.reductions import Count
from natgrad.damping import ByKind
from natgrad.distributed import Communicator
from natgrad.preconditioner.counters import StepCounters
from natgrad.preconditioner.epochs import EpochState
from natgrad.preconditioner.gradients.clip import Clip
from natgrad.preconditioner.gradients.scaling import Scaling
from natgrad.preconditioner.guard.guard import FailureCounters
from natgrad.preconditioner.guard.inspection import Inspection
from natgrad.preconditioner.refresh import BackgroundRefresh, RefreshScheduler
from natgrad.preconditioner.structure import Structure
from natgrad.state.block_group import BlockGroup


@dataclass(kw_only=True)
class Parts:
    """The state of a `natgrad.Preconditioner` that more than one phase of a step needs.

    Attributes:
        model: The model as the user calls it.
        structure: The covered layers, their blocks and their ranks.
        runtime: Sends messages.
        hooks: The hooks on the layers.
        capture: Collects statistics from what the hooks report.
        sampler: Draws labels.
        scaling: How the loss is scaled.
        damping: The damping of each step.
        scheduler: Applies the refresh rule.
        background: Decompositions in the background.
        clip: The KL clip.
        failure_counters: Counts failures.
        inspection: Finds layers that are used in unexpected ways.
        progress: Counts steps.
        epochs: The epochs, for HyLo.
    """

    model: nn.Module
    structure: Structure
    runtime: Communicator
    hooks: Hooks
    capture: Capture
    sampler: LabelSampler
    scaling: Scaling
    damping: ByKind
    scheduler: RefreshScheduler
    background: BackgroundRefresh
    clip: Clip
    failure_counters: FailureCounters
    inspection: Inspection
    progress: StepCounters
    epochs: EpochState

    @property
    def groups(self) -> list[BlockGroup]:
        """The groups of blocks."""
        return self.structure.groups

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

    def gains(self, count: Count | None) -> tuple[Mapping[str, float], float | Tensor]:
        """Return the part of each layer's samples or tokens that counts, and the factor of captured gradients."""
        return self.capture.shares(count), self.scaling.of_captured(len(self.capture.backwards))
