"""Running mixup: each batch is mixed with the mixture before it."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from natgrad.capture.labels import seed_of
from natgrad.errors import describe, require
from natgrad.recipes.labels import soft_labels
from natgrad.schedule import check_number


class RunningMixup:
    """Mixes samples and labels with those of the step before (Osawa 2019, section 4.1, eq. 9 to 11).

    ``x̃_t = λ x_t + (1 - λ) x̃_{t-1}`` and the same of the labels, with one λ ~ Beta(α, α) a step; the first step is raw.

    Row i of a batch is mixed with what row i was last. Rows that have no past stay raw: those of the first batch, and
    those by which a batch is longer than all before. A shorter batch, such as the last of an epoch, leaves the past of
    the other rows as it is.

    Each rank has a mixture and a λ of its own. Where a step takes K backward passes and their samples do not fit the
    memory together, give each pass its own `RunningMixup`, of another seed.

    Example:
        >>> mixup = recipes.RunningMixup(0.4, classes=1000)
        >>> for inputs, targets in loader:
        ...     inputs, targets = mixup(inputs, targets)  # targets are now shares [B, 1000]
        ...     loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    """

    def __init__(self, alpha: float, *, classes: int | None = None, seed: int = 0, rank: int | None = None) -> None:
        """Begin without a past.

        Args:
            alpha: α, at least 0; the greater, the nearer λ is to one half. 0: samples stay raw, and only labels change.
            classes: C, for labels that are numbers of classes; None: only soft labels will come.
            seed: Of λ, which is a function of seed, rank and step.
            rank: Of this process; None: that in the default process group, or 0.

        Raises:
            ValueError: if `alpha` or `classes` is not allowed.
        """
        check_number("alpha", alpha, "a number >= 0", minimum=0)
        fits = classes is None or (type(classes) is int and classes >= 1)
        require(fits, "classes", classes, "a whole number >= 1, or None")
        self.alpha, self.classes, self.seed = alpha, classes, seed
        self.rank = rank if rank is not None else dist.get_rank() if dist.is_initialized() else 0
        self.steps = 0
        self._inputs: Tensor | None = None
        self._targets: Tensor | None = None

    def share(self, step: int) -> float:
        """Return λ of a step, counted from 0; it is drawn for the first step too, which does not use it."""
        if self.alpha == 0:
            return 1.0
        return Random(seed_of("mixup", self.seed, self.rank, step)).betavariate(self.alpha, self.alpha)

    @torch.no_grad()
    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixed batch; what was given stays as it is.

        Args:
            inputs: ``[B, ...]``, floating point.
            targets: Numbers of classes ``[B]``, or labels ``[B, ...]`` in floating point, such as shares of classes.

        Returns:
            Inputs shaped as given, and labels in floating point: ``[B, C]`` where they were numbers.

        Raises:
            ValueError: if inputs or labels are of another kind, or their samples of another shape than before.
        """
        require(inputs.is_floating_point() and inputs.ndim >= 1, "inputs", describe(inputs), "floating point, [B, ...]")
        if not targets.is_floating_point():
            require(self.classes is not None, "targets", describe(targets), "floating point where classes is None")
            targets = soft_labels(targets, self.classes or 0, dtype=inputs.dtype)
        fits = targets.ndim >= 1 and len(targets) == len(inputs)
        require(fits, "targets", describe(targets), f"labels of {len(inputs)} samples")
        for name, now, before in (("inputs", inputs, self._inputs), ("targets", targets, self._targets)):
            shape = now.shape[1:] if before is None else before.shape[1:]
            require(now.shape[1:] == shape, name, describe(now), f"samples of shape {list(shape)}, as before")
        share = self.share(self.steps)
        mixed, self._inputs = _mix(inputs, self._inputs, share)
        labels, self._targets = _mix(targets, self._targets, share)
        self.steps += 1
        return mixed, labels

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the mixture, which is this rank's own."""
        return {"steps": self.steps, "inputs": self._inputs, "targets": self._targets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank."""
        self.steps, self._inputs, self._targets = int(state["steps"]), state["inputs"], state["targets"]


def _mix(now: Tensor, before: Tensor | None, share: float) -> tuple[Tensor, Tensor]:
    """Return the mixture, and the past of the next one, which shares no memory with it."""
    if before is None:
        return now.clone(), now.clone()
    before = before.to(now)
    both = min(len(now), len(before))
    mixed = torch.cat((torch.lerp(before[:both], now[:both], share), now[both:]))
    return mixed, torch.cat((mixed, before[both:]))
