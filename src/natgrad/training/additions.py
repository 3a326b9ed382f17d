"""What a job adds to each step besides forward, backward and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from natgrad.recipes import CenteredDecay, RunningMixup, WeightRescaling, ZeroErasing
from natgrad.tasks.batches import Batch

from .job import Job


class Additions:
    """Running mixup, zero erasing, centred decay and weight rescaling, those that the job has.

    Args:
        job: A resolved job.
        model: The model.
        rank: The rank of this process.
    """

    def __init__(self, job: Job, model: nn.Module, rank: int) -> None:
        self._mixup: RunningMixup | None = None
        self._erasing: ZeroErasing | None = None
        self._decay: CenteredDecay | None = None
        if job.mixup:
            classes = job.build_task().image_classes
            self._mixup = RunningMixup(job.mixup, classes=classes, seed=job.seed, rank=rank)
        if job.erasing:
            self._erasing = ZeroErasing(job.erasing, seed=job.seed, rank=rank)
        decay = job.damping_value(scale=job.centred_decay) if job.centred_decay else None
        if decay is not None:
            self._decay = CenteredDecay(model, decay, norms=job.norm_damping)
        self._rescaling = WeightRescaling(model) if job.rescale_weights else None

    def augment(self, inputs: Batch, targets: Batch) -> tuple[Batch, Batch]:
        """Return the batch to train on: mix, then erase."""
        if self._mixup is not None:
            inputs, targets = self._mixup(inputs, targets)
        return (inputs if self._erasing is None else self._erasing(inputs)), targets

    def change_gradients(self) -> None:
        """Add weight decay to ``.grad`` before it is preconditioned."""
        if self._decay is not None:
            self._decay.step()

    def change_weights(self) -> None:
        """Rescale the weights after the optimizer's step."""
        if self._rescaling is not None:
            self._rescaling.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's mixup; the rest follows from the step."""
        return {} if self._mixup is None else self._mixup.state_dict()

    def load_state_dict(self, step: int, own: Mapping[str, Any] | None) -> None:
        """Restore the state of this rank after `step` steps; None: a new rank, which starts without a mixture."""
        if self._mixup is not None:
            self._mixup.load_state_dict({"steps": step, "inputs": None, "targets": None} if own is None else dict(own))
        for part in (self._erasing, self._decay):
            if part is not None:
                part.load_state_dict({"steps": step})
