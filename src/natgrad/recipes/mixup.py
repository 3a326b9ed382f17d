"""Running mixup, which mixes each batch with the mixture before it, and labels as class probabilities."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import one_hot

from natgrad.capture.sampled import seed_of
from natgrad.errors import describe, require
from natgrad.printed import call_text
from natgrad.schedule import check_number, check_whole, is_whole


def soft_labels(targets: Tensor, classes: int, *, smoothing: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``(1 - s) onehot(y) + s / C``: one-hot labels, or smoothed ones.

    Their cross-entropy equals ``cross_entropy(..., label_smoothing=s)``. Use them to mix labels.

    Args:
        targets: y, class indices ``[...]``.
        classes: C, the number of classes.
        smoothing: s, in [0, 1] (Szegedy et al. 2016, "Rethinking the Inception architecture", section 7; 0.1 in
            Pauloski 2022, section 6.3.1).
        dtype: The dtype of the result.

    Returns:
        Class probabilities ``[..., C]``.

    Raises:
        ValueError: if `targets` are not integers from 0 to C - 1, or another argument is not allowed.
    """
    require(isinstance(targets, Tensor), "targets", targets, "a tensor of classes")
    whole = not targets.is_floating_point() and not targets.is_complex() and targets.dtype != torch.bool
    require(whole, "targets", describe(targets), "numbers of classes")
    check_number("smoothing", smoothing, "a share in [0, 1]", minimum=0)
    require(smoothing <= 1, "smoothing", smoothing, "a share in [0, 1]")
    check_whole("classes", classes, 1, 2**31 - 1)
    within = not targets.numel() or (int(targets.min()) >= 0 and int(targets.max()) < classes)
    require(within, "targets", describe(targets), f"classes from 0 to {classes - 1}, as classes={classes}")
    fits = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    require(fits, "dtype", dtype, "a floating point dtype of at least 16 bits")
    return one_hot(targets.long(), classes).to(dtype).mul_(1 - smoothing).add_(smoothing / classes)


class RunningMixup:
    """Mixes samples and labels with those of the step before (Osawa 2019, section 4.1, eq. 9 to 11).

    ``x̃_t = λ x_t + (1 - λ) x̃_{t-1}``, likewise for the labels, with x̃_1 = x_1. Each sample has λ = max(λ', 1 - λ') of
    its own, λ' ~ Beta(α, α), as in the authors' code, so that the new sample has the larger share.

    Row i of a batch is mixed with the last mixture in row i. Rows without one are not mixed: those of the first batch,
    and those beyond the longest batch so far. A shorter batch, such as the last of an epoch, does not change the
    mixtures of the other rows.

    Each rank has a separate mixture. If a step has several backward passes whose samples do not fit in memory
    together, use a separate `RunningMixup` for each pass, with different seeds.

    Examples:
        >>> mixup = recipes.RunningMixup(0.4, classes=1000)
        >>> for inputs, targets in loader:
        ...     inputs, targets = mixup(inputs, targets)  # targets are now probabilities [B, 1000]
        ...     loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    """

    def __init__(self, alpha: float, *, classes: int | None = None, seed: int = 0, rank: int | None = None) -> None:
        """Start without a mixture.

        Args:
            alpha: α in [0, 1e6]; the larger, the nearer λ is to 1/2. 0: no mixing; only labels are converted.
            classes: C, for labels that are class indices; None: all labels are soft.
            seed: λ is a function of seed, rank, step and the sample's place in the batch.
            rank: The rank of this process; None: its rank in the default process group, or 0.

        Raises:
            ValueError: if an argument is not allowed.
        """
        check_number("alpha", alpha, "a number in [0, 1e6]", minimum=0)
        require(alpha <= 1e6, "alpha", alpha, "a number in [0, 1e6]")
        check_whole("classes", classes, 1, 2**31 - 1, optional=True)
        require(is_whole(seed), "seed", seed, "a whole number")
        check_whole("rank", rank, 0, optional=True)
        self.alpha, self.classes, self.seed = alpha, classes, seed
        self.rank = rank if rank is not None else dist.get_rank() if dist.is_initialized() else 0
        self.steps = 0
        self._inputs: Tensor | None = None
        self._targets: Tensor | None = None

    def __repr__(self) -> str:
        return call_text(self, alpha=self.alpha, classes=self.classes, seed=self.seed, rank=self.rank)

    def shares(self, step: int, samples: int) -> Tensor:
        """Return λ of each sample of a step, counted from 0 (float64). The first step does not use them."""
        if self.alpha == 0:
            return torch.ones(samples, dtype=torch.float64)
        numbers = Random(seed_of("mixup", self.seed, self.rank, step))
        drawn = [numbers.betavariate(self.alpha, self.alpha) for _ in range(samples)]
        shares = torch.tensor(drawn, dtype=torch.float64)
        return torch.maximum(shares, 1 - shares)

    @torch.no_grad()
    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixed batch; the arguments do not change.

        Args:
            inputs: ``[B, ...]``, floating point.
            targets: Class indices ``[B]``, or floating point labels ``[B, ...]``, such as class probabilities.

        Returns:
            Inputs of the same shape, and floating point labels, ``[B, C]`` for class indices.

        Raises:
            ValueError: if inputs or labels have another dtype, or samples another shape than before.
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
        shares = self.shares(self.steps, len(inputs))
        mixed, self._inputs = _mix(inputs, self._inputs, shares)
        labels, self._targets = _mix(targets, self._targets, shares)
        self.steps += 1
        return mixed, labels

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and this rank's mixture."""
        return {"steps": self.steps, "inputs": self._inputs, "targets": self._targets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict` on this rank."""
        self.steps, self._inputs, self._targets = int(state["steps"]), state["inputs"], state["targets"]


def _mix(now: Tensor, before: Tensor | None, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mixed rows, and a copy of them for the next step."""
    if before is None:
        return now.clone(), now.clone()
    before = before.to(now)
    both = min(len(now), len(before))
    wide = torch.promote_types(now.dtype, torch.float32)  # shares near 1 would round to 1 in 16 bits
    shares = shares[:both].view(-1, *[1] * (now.ndim - 1)).to(now.device, wide)
    mixture = torch.lerp(before[:both].to(wide), now[:both].to(wide), shares).to(now.dtype)
    mixed = torch.cat((mixture, now[both:]))
    return mixed, torch.cat((mixed, before[both:]))
