"""Labels drawn from the model's prediction, for the sampled Fisher."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from natgrad.curvature.likelihood import Likelihood
from natgrad.errors import describe, require


class LabelSampler:
    """Draws labels as a function of seed, rank and step, so that resuming needs no generator state."""

    def __init__(self, *, seed: int, rank: int, reduction: str) -> None:
        """Initialize; each rank draws different labels."""
        self.seed, self._rank, self._reduction = seed, rank, reduction
        self._last = (-1, 0)  # step, and number of draws in it

    def score(self, likelihood: Likelihood, outputs: Tensor, mask: Tensor | None, step: int) -> Tensor:
        """Return the derivative of the loss at drawn labels by the outputs, in the shape of `outputs`.

        Several draws in the same step differ.

        Args:
            likelihood: The distribution of labels.
            outputs: The outputs of the model, detached.
            mask: As in `natgrad.Preconditioner.backward`.
            step: Completed steps.

        Raises:
            ValueError: if `outputs` or `mask` has a wrong shape. Nothing has been drawn then.
        """
        draw = self._last[1] + 1 if self._last[0] == step else 0
        score = likelihood.score(
            outputs,
            self._generator(step, draw, outputs.device),
            summed=self._reduction == "sum",
            first_feature=outputs.ndim - 1 if self._reduction == "tokens" else 1,
        )
        if mask is not None:
            last = score.movedim(likelihood.dim, -1)
            fits = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == last.shape[: mask.ndim]
            allowed = f"bool, of the leading dimensions of outputs, classes last: {list(last.shape)}"
            require(fits, "mask", describe(mask), allowed)
            kept = mask.view(*mask.shape, *[1] * (last.ndim - mask.ndim))
            score = (last * kept).movedim(-1, likelihood.dim)
        self._last = (step, draw)
        return score

    def _generator(self, step: int, draw: int, device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed(seed_of(self.seed, self._rank, step, draw))


def seed_of(*parts: int | str) -> int:
    """Return a seed below 2⁶³ that depends on `parts`, such as a user's seed, a rank and a step."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
