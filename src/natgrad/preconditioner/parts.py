"""What the phases of a step work on, and what they all ask."""

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
    """The parts that a `natgrad.Preconditioner` is made of.

    Attributes:
        model: The model as the user calls it.
        root: The model without wrappers.
        structure: The covered layers, their blocks, and who works for them.
        runtime: Sends messages.
        hooks: The hooks on the layers.
        capture: What is made of what they report.
        reductions: What the loss averages over.
        scaling: How the loss is scaled.
        damping: The damping of each step.
        refresh: The rule of when curvature is recomputed.
        scheduler: Asks the rule.
        background: Decompositions beside the steps.
        clip: The KL clip.
        given: The gradients that the last step wrote.
        second: The second pass over a batch.
        sampler: Draws labels.
        watch: Counts failures.
        inspection: Finds layers that curvature does not describe.
        progress: Counts steps.
        epochs: What is known of the epochs.
        precision: The dtypes.
        reduces: Whether natgrad averages the gradients over the ranks.
        seed: Of everything that is drawn.
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
    def stacks(self) -> list[BlockGroup]:
        """The blocks."""
        return self.structure.stacks

    @property
    def device(self) -> torch.device | None:
        """Where the first parameter of the model is; None: it has none."""
        return next((parameter.device for parameter in self.root.parameters()), None)

    @property
    def summed(self) -> list[BlockGroup]:
        """Those blocks whose statistics are summed."""
        return [stack for stack in self.stacks if stack.statistics]

    @property
    def gathered(self) -> list[BlockGroup]:
        """Those blocks whose statistics are gathered."""
        return [stack for stack in self.stacks if stack.gathered]

    @property
    def shares_work(self) -> bool:
        """Whether ranks work for some layers only, and send each other what they have preconditioned."""
        return self.structure.plan.columns > 1

    @property
    def renews_in_background(self) -> bool:
        """Whether decompositions run beside the steps. The first ones never do."""
        return self.structure.plan.placement.rule.renews_in_background and self.progress.last_inverses is not None

    def agreed(self, flag: bool) -> bool:
        """Return whether any rank says so, where ranks work for some layers only; else whether this one does."""
        return self.runtime.any(flag) if self.shares_work else flag

    def spent(self) -> float:
        """Return the seconds that preconditioning has taken so far."""
        return sum(self.progress.seconds.values()) + self.capture.seconds

    def damping_now(self) -> float:
        """Return γ of the coming step.

        Raises:
            ValueError: if a schedule returns what is not allowed.
        """
        damping = self.damping.now(self.progress.step)
        check_damping([(one.curvature, one.factor) for one in self.stacks if one.replayed_statistics], damping)
        return damping

    def gains(self, count: Count | None) -> tuple[Mapping[str, float], float | Tensor]:
        """Return what part of a layer's samples or tokens counts, and what captured gradients are multiplied by."""
        return self.capture.shares(count), self.scaling.of_captured(len(self.capture.backwards))

    def layer_scale(self, layer: Layer) -> float | Tensor:
        """Return what makes the gradient of a layer that of its mean loss, beside the scale of the other layers."""
        of_sum = self.scaling.of_sum
        return of_sum if of_sum is not None and self.reductions.of(layer.name) == "sum" else 1.0
