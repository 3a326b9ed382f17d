"""The operations that a recipe adds to each step, and its backward passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .job import Job


def passes(job: Job) -> int:
    """Return the fewest backward passes per step with at most the task's default batch per rank and pass.

    The paper does so for batches that do not fit in memory (section 5.1). 1 if the ranks do not divide the batch.
    """
    samples, most = job.global_batch // job.workers, job.build_task().batch_size
    if job.global_batch % job.workers:
        return 1
    return next(count for count in range(1, samples + 1) if samples % count == 0 and samples // count <= most)


class Additions:
    """Operations of a step besides forward, backward and optimizer. This base class does nothing."""

    def augment(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the batch to train on."""
        return inputs, targets

    def change_gradients(self) -> None:
        """Change ``.grad`` before it is preconditioned."""

    def change_weights(self) -> None:
        """Change the weights after the optimizer's step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank."""
        return {}

    def load_state_dict(self, step: int, own: Mapping[str, Any] | None) -> None:
        """Restore the state of this rank after `step` steps; None: a new rank."""


class LargeBatchAdditions(Additions):
    """Running mixup, zero erasing, centred decay and weight rescaling.

    Args:
        job: A resolved job.
        model: The model.
        rank: The rank of this process.
    """

    def __init__(self, job: Job, model: nn.Module, rank: int) -> None:
        values, classes = job.large_batch(), job.build_task().image_classes
        assert classes is not None
        self._mixup = values.build_mixup(classes, seed=job.seed, rank=rank)
        self._erasing = values.build_erasing(seed=job.seed, rank=rank)
        self._decay, self._rescaling = values.build_decay(model), values.build_rescaling(model)

    def augment(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mix, then erase."""
        mixed, shares = self._mixup(inputs, targets)
        return self._erasing(mixed), shares

    def change_gradients(self) -> None:
        """Add weight decay."""
        self._decay.step()

    def change_weights(self) -> None:
        """Rescale the weights."""
        self._rescaling.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the mixup; the rest follows from the step."""
        return self._mixup.state_dict()

    def load_state_dict(self, step: int, own: Mapping[str, Any] | None) -> None:
        """Restore the mixture; a new rank starts without one."""
        fresh = {"steps": step, "inputs": None, "targets": None}
        self._mixup.load_state_dict(fresh if own is None else dict(own))
        for part in (self._erasing, self._decay):
            part.load_state_dict({"steps": step})


def additions(job: Job, model: nn.Module, rank: int) -> Additions:
    """Return the additions of the job's recipe."""
    return Additions() if job.recipe == "none" else LargeBatchAdditions(job, model, rank)
