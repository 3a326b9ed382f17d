"""What a recipe changes in a job, and what it adds to the steps of its training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from natgrad import recipes
from natgrad.errors import require

if TYPE_CHECKING:
    from .job import Job

RecipeName = Literal["none", "large-batch"]


def check(job: Job) -> None:
    """Check the job's task, and that it is one for the job's recipe.

    Raises:
        ValueError: No such task or option, or no recipe for it.
    """
    task = job.build_task()
    fits = job.recipe == "none" or task.image_classes is not None
    require(fits, "recipe", job.recipe, f"none for {job.task}: it is for classes of images")


def row(job: Job) -> recipes.LargeBatch:
    """Return the recipe at the job's batch size and length."""
    samples = len(job.build_task().datasets()[0])
    epochs = job.epochs or job.total_steps / math.ceil(samples / job.global_batch)
    return recipes.large_batch(job.global_batch, samples=samples, epochs=epochs)


def filled(job: Job) -> Job:
    """Return a job with what its recipe decides; a learning rate, form, Fisher and placement that are given stay."""
    if job.recipe == "none":
        return job
    values = row(job)
    return replace(
        job,
        optimizer="heavyball",
        options={"momentum": values.momentum},
        learning_rate=job.learning_rate or values.learning_rate,
        schedule="constant",
        warmup=0,
        curvature="kfac",
        curvature_options={"factor_decay": values.factor_decay},
        form=job.form or "inverse",
        fisher=job.fisher or "empirical",
        factors=1,
        inverses=1,
        damping=values.damping,
        kl_clip=None,
    )


def passes(job: Job) -> int:
    """Return the fewest backward passes a step in which a rank sees at most the task's own batch at once.

    As the paper does for batches beyond its memory (section 5.1); batch norm sees the samples of one pass. It is 1 for
    a batch that the ranks cannot share.
    """
    own, most = job.global_batch // job.workers, job.build_task().batch_size
    if job.global_batch % job.workers:
        return 1
    return next(count for count in range(1, own + 1) if own % count == 0 and own // count <= most)


class Additions:
    """What happens in a step besides forward, backward and the optimizer; without a recipe nothing."""

    def augment(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the batch that is trained on."""
        return inputs, targets

    def change_gradients(self) -> None:
        """Change ``.grad`` before it is preconditioned."""

    def change_weights(self) -> None:
        """Change the weights after the optimizer's step."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is this rank's own."""
        return {}

    def load_state_dict(self, step: int, own: Mapping[str, Any] | None) -> None:
        """Go on after `step` steps, with this rank's own state, or without where it has none."""


class LargeBatchAdditions(Additions):
    """Running mixup, zero erasing, centred decay and weight rescaling.

    Args:
        job: A resolved job.
        model: What is trained.
        rank: Of this process.
    """

    def __init__(self, job: Job, model: nn.Module, rank: int) -> None:
        """Build the parts."""
        values, classes = row(job), job.build_task().image_classes
        assert classes is not None
        self._mixup = values.build_mixup(classes, seed=job.seed, rank=rank)
        self._erasing = values.build_erasing(seed=job.seed, rank=rank)
        self._decay, self._rescaling = values.build_decay(model), values.build_rescaling(model)

    def augment(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mix, then erase."""
        mixed, shares = self._mixup(inputs, targets)
        return self._erasing(mixed), shares

    def change_gradients(self) -> None:
        """Decay."""
        self._decay.step()

    def change_weights(self) -> None:
        """Rescale."""
        self._rescaling.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the mixture; all else is known by the step."""
        return self._mixup.state_dict()

    def load_state_dict(self, step: int, own: Mapping[str, Any] | None) -> None:
        """Go on; a rank that is new begins a mixture."""
        fresh = {"steps": step, "inputs": None, "targets": None}
        self._mixup.load_state_dict(fresh if own is None else dict(own))
        for part in (self._erasing, self._decay):
            part.load_state_dict({"steps": step})


def additions(job: Job, model: nn.Module, rank: int) -> Additions:
    """Return what the job's recipe adds."""
    return Additions() if job.recipe == "none" else LargeBatchAdditions(job, model, rank)
