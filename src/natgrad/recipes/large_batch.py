"""The large-batch recipe of Osawa 2019: the printed values by batch size, and the parts that use them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from natgrad import KFAC, Curvature, Preconditioner, Refresh
from natgrad.curvature.unitwise import FORMS, for_norms
from natgrad.damping import ByKind, WarmUp
from natgrad.errors import require, require_one_of
from natgrad.layers.norm import NORMS
from natgrad.recipes.erasing import ZeroErasing
from natgrad.recipes.heavy_ball import HeavyBall
from natgrad.recipes.mixup import RunningMixup
from natgrad.recipes.schedules import PolynomialDecay
from natgrad.recipes.weights import CenteredDecay, WeightRescaling
from natgrad.schedule import check_number

IMAGENET = 1_281_167
"""Training images of ImageNet-1k."""

FISHER_SCALE = 1000.0
"""Natgrad's Fisher over that of the paper: η_0 and the γ of F + γI are multiplied by it; the γ of ∇E is not."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of table 3, with the epochs of table 1, in the paper's scale.

    Attributes:
        batch_size: Samples per step.
        epochs: Length of the training.
        mixup: α of running mixup.
        initial_damping: γ_0.
        damping: γ_target.
        norms: ρ_BN.
        damping_steps: t_warmup.
        power: p_decay.
        start: e_start, in epochs.
        end: e_end, in epochs.
        learning_rate: η_0.
        momentum: m_0.
    """

    batch_size: int
    epochs: float
    mixup: float
    initial_damping: float
    damping: float
    norms: float
    damping_steps: int
    power: float
    start: float
    end: float
    learning_rate: float
    momentum: float


def _row(*values: float) -> Row:
    return Row(**dict(zip(Row.__annotations__, values, strict=True)))  # type: ignore[arg-type]


ROWS = (
    _row(4096, 35, 0.4, 2.5e-5, 2.5e-7, 16, 313, 11.0, 1, 53, 8.18e-6, 0.997),
    _row(8192, 35, 0.4, 2.5e-5, 2.5e-7, 16, 157, 8.0, 1, 53.5, 1.25e-5, 0.993),
    _row(16384, 35, 0.4, 2.5e-5, 2.5e-7, 32, 79, 8.0, 1, 53.5, 2.5e-5, 0.985),
    _row(32768, 45, 0.6, 2.0e-5, 2.0e-7, 16, 59, 3.5, 1.5, 49.5, 3.0e-5, 0.97),
    _row(65536, 60, 0.6, 1.5e-5, 1.5e-7, 16, 40, 2.9, 2, 64.5, 4.0e-5, 0.95),
    _row(131072, 100, 1.0, 1.0e-5, 1.0e-7, 8, 30, 2.9, 3, 107.6, 7.0e-5, 0.93),
)
"""Table 3, and the epochs of table 1."""


_MOST_OF_A_TRAINING = 0.25
"""The largest share of the training for warm-up, and for the memory 1 / (1 - m_0) of momentum."""

_LEAST_WARM_UP = 2.0
"""The least warm-up relative to the fewest steps that eq. 15 allows: γ - γ_target then halves in each step."""


@dataclass(frozen=True, kw_only=True)
class LargeBatch(Row):
    """Hyper-parameters for one batch size (Osawa 2019, section 4 and table 3).

    They are the fields of a `Row`, with η_0, γ_0 and γ_target in the scale of natgrad's Fisher, and:

    Attributes:
        samples: Number of training samples.
        erasing: Share of the images that are erased.
        centred_decay: Ratio of the γ of ∇E to that of F + γI.
        norm_form: F of norm layers: "full" (section 5.3), "diag" (5.4), or "unit", 2 x 2 blocks (see `UnitWise`).
    """

    samples: int
    erasing: float = 0.5
    centred_decay: float = 1 / FISHER_SCALE
    norm_form: Literal["full", "unit", "diag"] = "full"

    @property
    def factor_decay(self) -> float:
        """Weight of the old value in the factors: 0 for batches B of at least 4096, below that 1 - B / 4096."""
        return max(0.0, 1 - self.batch_size / ROWS[0].batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch; the last batch may be smaller."""
        return math.ceil(self.samples / self.batch_size)

    def damping_schedule(self) -> ByKind:
        """Return the schedule of γ in F + γI, with warm-up; it is multiplied by ρ for norm layers."""
        return ByKind(WarmUp(self.initial_damping, self.damping, self.damping_steps), norms=self.norms)

    def build_mixup(self, classes: int, *, seed: int = 0, rank: int | None = None) -> RunningMixup:
        """Return the running mixup."""
        return RunningMixup(self.mixup, classes=classes, seed=seed, rank=rank)

    def build_erasing(self, *, seed: int = 0, rank: int | None = None) -> ZeroErasing:
        """Return the random erasing of mixed images."""
        return ZeroErasing(self.erasing, seed=seed, rank=rank)

    def build_decay(self, model: nn.Module) -> CenteredDecay:
        """Return the weight decay, which computes ∇E from ∇L."""
        first, last = (self.centred_decay * damping for damping in (self.initial_damping, self.damping))
        return CenteredDecay(model, WarmUp(first, last, self.damping_steps), norms=self.norms)

    def build_optimizer(self, model: nn.Module) -> HeavyBall:
        """Return the optimizer of all trainable parameters."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return HeavyBall(trained, lr=self.learning_rate, momentum=self.momentum)

    def build_scheduler(self, optimizer: Optimizer) -> PolynomialDecay:
        """Return the scheduler. Call its `step` after each step of the optimizer."""
        start, end = (epoch * self.steps_per_epoch for epoch in (self.start, self.end))
        return PolynomialDecay(optimizer, start=start, end=end, power=self.power)

    def build_curvature(self, curvature: Curvature) -> dict[str | type[nn.Module], Curvature]:
        """Return `curvature`, and for norm layers, with the same Fisher, the form of the recipe."""
        return {**dict.fromkeys(NORMS, for_norms(curvature, self.norm_form)), "*": curvature}

    def build_preconditioner(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> Preconditioner:
        """Return the preconditioner: K-FAC without a KL clip, with a refresh at every step.

        Its factors are those of each batch, or for batches below 4096 a running average over about 4096 samples.

        Args:
            model: The model, as for `natgrad.Preconditioner`.
            optimizer: The optimizer.
            **options: Arguments of `natgrad.Preconditioner` that replace the recipe's, such as ``refresh``.
        """
        defaults: dict[str, Any] = {
            "curvature": self.build_curvature(KFAC(form="inverse", factor_decay=self.factor_decay)),
            "damping": self.damping_schedule(),
            "kl_clip": None,
            "refresh": Refresh(factors=1, inverses=1),
        }
        return Preconditioner(model, optimizer=optimizer, **(defaults | options))

    def build_rescaling(self, model: nn.Module) -> WeightRescaling:
        """Return the rescaling of weights. Call its `step` after each step of the optimizer."""
        return WeightRescaling(model)


def large_batch(
    batch_size: int,
    *,
    samples: int = IMAGENET,
    epochs: float | None = None,
    norm_form: Literal["full", "unit", "diag"] = "full",
) -> LargeBatch:
    """Return the recipe for a batch size: the row of table 3, in natgrad's scale.

    Other batch sizes and data sets use the row with the nearest number of steps per epoch (by ratio; if two are equally
    near, that of the smaller batch), with these changes:

    * t_warmup and the memory 1 / (1 - m_0) of momentum keep their number of epochs, or beyond the largest batch of the
      table their number of steps, but take at most a quarter of the training.
    * η_0 / (1 - m_0) is kept.
    * e_start keeps its share of the training, and the final η its share of η_0.
    * In trainings of fewer steps than the row's, p falls as the square root of the steps, but not below 1.
    * For batches B below 4096, the factors are running averages with weight B / 4096 for a new batch.
    * The damping warm-up takes at least twice the fewest steps that eq. 15 allows, and m_0 is at least 0.

    The paper only tested the rows. Elsewhere, use the values as the start of a search.

    Args:
        batch_size: Samples per step over all ranks and backward passes.
        samples: Number of training samples; default: that of ImageNet.
        epochs: Length of the training; None: that of table 1.
        norm_form: F of norm layers: "full", the matrix of all weights and biases of a layer (section 5.3); "diag", its
            diagonal (5.4), with a fraction of the memory; or "unit", a 2 x 2 block for each channel.

    Raises:
        ValueError: if a number is not allowed.
    """
    fits = type(samples) is int and samples >= 1
    require(fits, "samples", samples, "a whole number >= 1")
    fits = type(batch_size) is int and 1 <= batch_size <= samples
    require(fits, "batch_size", batch_size, f"a whole number from 1 to samples={samples}")
    if epochs is not None:
        check_number("epochs", epochs, "a number > 0, or None", minimum=0, strict=True)
    require_one_of("norm_form", norm_form, *FORMS)
    steps = math.ceil(samples / batch_size)
    row = min(ROWS, key=lambda candidate: abs(math.log(steps / _steps(candidate))))
    epochs = row.epochs if epochs is None else epochs
    stretch = steps / _steps(row)
    if row is ROWS[-1]:
        stretch = max(stretch, 1.0)
    longest = _MOST_OF_A_TRAINING * epochs * steps
    memory = min(stretch / (1 - row.momentum), longest)
    momentum = max(0.0, 1 - 1 / memory)
    fewest = _LEAST_WARM_UP * 2 * math.log10(row.initial_damping / row.damping)
    warm_up = max(min(row.damping_steps * stretch, longest), fewest)
    power = _power(row, epochs * steps)
    fitted = {
        "batch_size": batch_size,
        "samples": samples,
        "epochs": epochs,
        "start": row.start * epochs / row.epochs,
        "end": _end(row, power) * epochs / row.epochs,
        "power": power,
        "norm_form": norm_form,
        "damping_steps": round(warm_up),
        "momentum": momentum,
        "learning_rate": FISHER_SCALE * row.learning_rate * (1 - momentum) / (1 - row.momentum),
        "initial_damping": FISHER_SCALE * row.initial_damping,
        "damping": FISHER_SCALE * row.damping,
    }
    return LargeBatch(**(asdict(row) | fitted))


def _steps(row: Row) -> int:
    """Return the steps of an epoch."""
    return math.ceil(IMAGENET / row.batch_size)


def _power(row: Row, steps: float) -> float:
    """Return p for a training of `steps` steps."""
    share = min(1.0, steps / (row.epochs * _steps(row)))
    return max(1.0, row.power * math.sqrt(share))


def _end(row: Row, power: float) -> float:
    """Return e_end for another p, such that the row's final η / η_0 stays the same."""
    if power == row.power:
        return row.end
    left = (1 - (row.epochs - row.start) / (row.end - row.start)) ** (row.power / power)
    return float(row.start + (row.epochs - row.start) / (1 - left))
