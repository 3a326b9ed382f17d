"""The model's predictive distributions, from which the sampled (true) Fisher draws labels.

For a per-sample loss that is c times a negative log-likelihood, `score` draws labels and returns the derivative of the
per-sample loss with respect to the outputs, scaled so that its second moment is the exact Fisher (the generalised
Gauss-Newton matrix) of that loss: sqrt(c) times the derivative of the negative log-likelihood at the drawn label.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from natgrad.errors import did_you_mean, require, with_suggestions
from natgrad.schedule import check_number, is_whole


class Likelihood(ABC):
    """A predictive distribution, whose negative log-likelihood is the loss up to a factor.

    Attributes:
        dim: The dimension of classes or features in the outputs.
    """

    dim: int = -1

    @abstractmethod
    def score(self, outputs: Tensor, generator: torch.Generator, *, summed: bool, first_feature: int) -> Tensor:
        """Draw labels and return the per-sample derivative by the outputs.

        Args:
            outputs: The model's outputs, detached, of any shape with samples first.
            generator: The random number generator, on the outputs' device.
            summed: Whether the loss sums over a sample's outputs (torch's ``reduction="sum"``) or averages them.
            first_feature: The first dimension that belongs to a single sample: 1, or the last for token losses.

        Returns:
            A tensor shaped like `outputs`, at least float32.

        Raises:
            ValueError: if `outputs` does not fit the likelihood.
        """


@with_suggestions
@dataclass(frozen=True)
class Categorical(Likelihood):
    """Softmax with cross-entropy; each position of an output with more dimensions is a separate term of the loss.

    Attributes:
        dim: The dimension of the classes: -1 for ``[batch, classes]`` and ``[batch, positions, classes]``, 1 for
            torch's ``[batch, classes, height, width]``.
    """

    dim: int = -1

    def __post_init__(self) -> None:
        require(is_whole(self.dim) and self.dim != 0, "dim", self.dim, "a dimension other than 0, the batch")

    def score(self, outputs: Tensor, generator: torch.Generator, *, summed: bool, first_feature: int) -> Tensor:
        """Return ``softmax(outputs) - onehot(label)``, the label drawn from the softmax."""
        fits = outputs.ndim >= 2 and -outputs.ndim < self.dim < outputs.ndim
        require(fits, "outputs", tuple(outputs.shape), f"logits with classes in dimension dim={self.dim}")
        logits = outputs.movedim(self.dim, -1)
        probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        drawable = probabilities.flatten(0, -2).nan_to_num(1.0)  # the score keeps the NaN, which the guard detects
        labels = torch.multinomial(drawable, 1, generator=generator).view(*logits.shape[:-1], 1)
        score = probabilities.scatter_add(-1, labels, probabilities.new_full((), -1).expand(labels.shape))
        return score.movedim(-1, self.dim)


@dataclass(frozen=True)
class _Elementwise(Likelihood):
    """Independent outputs under a loss with a coefficient.

    Attributes:
        coefficient: The factor c of a sample's summed loss. None: that of torch's losses, 1 / outputs per sample for
            the mean over elements and 1 for the sum.
    """

    coefficient: float | None = None

    def __post_init__(self) -> None:
        if self.coefficient is not None:
            check_number("coefficient", self.coefficient, "a number > 0, or None", minimum=0, strict=True)

    def _coefficient(self, outputs: Tensor, summed: bool, first_feature: int) -> float:
        if self.coefficient is not None:
            return self.coefficient
        return 1.0 if summed else 1.0 / max(1, outputs.shape[first_feature:].numel())


@with_suggestions
@dataclass(frozen=True)
class Bernoulli(_Elementwise):
    """Independent logits under c · binary cross-entropy."""

    def score(self, outputs: Tensor, generator: torch.Generator, *, summed: bool, first_feature: int) -> Tensor:
        """Return ``sqrt(c) (sigmoid(outputs) - label)``, the label drawn with that probability."""
        probabilities = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).sigmoid()
        labels = torch.bernoulli(probabilities.nan_to_num(), generator=generator)  # the score keeps the NaN
        return (probabilities - labels).mul_(sqrt(self._coefficient(outputs, summed, first_feature)))


@with_suggestions
@dataclass(frozen=True)
class Gaussian(_Elementwise):
    """Regression under c · ‖f - y‖², which means y ~ N(f, I / (2c))."""

    def score(self, outputs: Tensor, generator: torch.Generator, *, summed: bool, first_feature: int) -> Tensor:
        """Return ``2c (f - y)`` = ``sqrt(2c) ε`` with ε ~ N(0, I)."""
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        noise = torch.randn(outputs.shape, generator=generator, dtype=dtype, device=outputs.device)
        return noise.mul_(sqrt(2 * self._coefficient(outputs, summed, first_feature)))


_BY_NAME: dict[str, Likelihood] = {"categorical": Categorical(), "bernoulli": Bernoulli(), "gaussian": Gaussian()}


def resolve(likelihood: str | Likelihood) -> Likelihood:
    """Return the likelihood of a name, or `likelihood` itself.

    Raises:
        ValueError: if it is neither a known name nor a `Likelihood`.
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    known = isinstance(likelihood, str) and likelihood in _BY_NAME
    allowed = f"one of {', '.join(map(repr, _BY_NAME))}, or a natgrad.Likelihood"
    require(known, "likelihood", likelihood, allowed, did_you_mean(likelihood, _BY_NAME))
    return _BY_NAME[likelihood]
