"""The whole recipe for a batch size: the paper's values, and the parts that they belong to."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from natgrad import KFAC, Preconditioner, Refresh
from natgrad.damping import ByKind, WarmUp
from natgrad.errors import require
from natgrad.recipes.decay import CenteredDecay
from natgrad.recipes.erasing import ZeroErasing
from natgrad.recipes.heavy_ball import HeavyBall
from natgrad.recipes.mixup import RunningMixup
from natgrad.recipes.polynomial import PolynomialDecay
from natgrad.recipes.rescaling import WeightRescaling
from natgrad.recipes.table import FISHER_SCALE, IMAGENET, ROWS, Row
from natgrad.schedule import check_number

_MOST_OF_A_TRAINING = 0.25
"""The share of the training that warm-up and the memory of momentum take at most."""

_LEAST_WARM_UP = 2.0
"""Times the fewest steps that eq. 15 allows: then γ comes nearer to its target by one half in each step."""

_LEAST_EPOCHS_TO_MIX = min(row.epochs for row in ROWS) / 2
"""Half the shortest training of the table: below it, samples are neither mixed nor erased."""


@dataclass(frozen=True, kw_only=True)
class LargeBatch(Row):
    """What to train with at one batch size, in natgrad's scale (Osawa 2019, section 4 and table 3).

    Besides the fields of a `Row`, whose η_0, γ_0 and γ_target belong to natgrad's Fisher here:

    Attributes:
        samples: Training samples.
        erasing: Share of the images that are erased.
        centred_decay: The γ of ∇E over that of F + γI.
    """

    samples: int
    erasing: float = 0.5
    centred_decay: float = 1 / FISHER_SCALE

    @property
    def factor_decay(self) -> float:
        """Weight of the past in the factors: 0 from the smallest batch of the table on, below it 1 - B / 4096."""
        return max(0.0, 1 - self.batch_size / ROWS[0].batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the samples, the last of which may have a smaller batch."""
        return math.ceil(self.samples / self.batch_size)

    def damping_schedule(self) -> ByKind:
        """Return γ of F + γI: it warms up, and is ρ times as great for norm layers."""
        return ByKind(WarmUp(self.initial_damping, self.damping, self.damping_steps), norms=self.norms)

    def build_mixup(self, classes: int, *, seed: int = 0, rank: int | None = None) -> RunningMixup:
        """Return what mixes batches with those before."""
        return RunningMixup(self.mixup, classes=classes, seed=seed, rank=rank)

    def build_erasing(self, *, seed: int = 0, rank: int | None = None) -> ZeroErasing:
        """Return what erases parts of the mixed images."""
        return ZeroErasing(self.erasing, seed=seed, rank=rank)

    def build_decay(self, model: nn.Module) -> CenteredDecay:
        """Return what makes ∇E of ∇L."""
        first, last = (self.centred_decay * each for each in (self.initial_damping, self.damping))
        return CenteredDecay(model, WarmUp(first, last, self.damping_steps), norms=self.norms)

    def build_optimizer(self, model: nn.Module) -> HeavyBall:
        """Return the optimizer of all parameters that are trained."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return HeavyBall(trained, lr=self.learning_rate, momentum=self.momentum)

    def build_scheduler(self, optimizer: Optimizer) -> PolynomialDecay:
        """Return the scheduler, to be stepped after each step of the optimizer."""
        start, end = (each * self.steps_per_epoch for each in (self.start, self.end))
        return PolynomialDecay(optimizer, start=start, end=end, power=self.power)

    def build_preconditioner(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> Preconditioner:
        """Return the preconditioner: K-FAC without a KL clip, renewed at every step.

        Its factors are those of each batch alone, or below batches of 4096 a running average over as many samples.

        Args:
            model: As `natgrad.Preconditioner` takes it.
            optimizer: The optimizer.
            **options: Of the preconditioner, which win over these, such as ``refresh`` or ``curvature``.
        """
        own: dict[str, Any] = {
            "curvature": KFAC(form="inverse", factor_decay=self.factor_decay),
            "damping": self.damping_schedule(),
            "kl_clip": None,
            "refresh": Refresh(factors=1, inverses=1),
        }
        return Preconditioner(model, optimizer=optimizer, **(own | options))

    def build_rescaling(self, model: nn.Module) -> WeightRescaling:
        """Return what gives weights their norm after each step."""
        return WeightRescaling(model)


def large_batch(batch_size: int, *, samples: int = IMAGENET, epochs: float | None = None) -> LargeBatch:
    """Return the recipe for a batch size: the row of table 3, in natgrad's scale.

    Elsewhere it is the row whose epochs have the nearest number of steps (by ratio; of two equally near the one of the
    smaller batch), fitted as the rows differ among themselves:

    * t_warmup and the steps 1 / (1 - m_0) that momentum remembers stay as many epochs, which are 0.8 to 3 in all rows;
      but beyond the largest batch of the table as many steps, and never more than a quarter of the training;
    * η_0 / (1 - m_0), the rate of a steady descent, stays; it is 0.8 to 2.7 in all rows;
    * e_start stays the same share of the training, and η at the end the same share of η_0;
    * in a training of fewer steps than the row's, p falls as their square root, as it does from row to row (11 at
      11 000 steps, 2.9 at 1 000), but not below 1: a rate that has all but gone after a third of a few steps wastes
      the others;
    * in less than half the epochs of the shortest row, 17.5, samples are neither mixed nor erased: both guard against
      learning by heart what is seen often, and cost epochs.

    Of batches below the smallest of the table, 4096, as many count in the factors as make up that one: their running
    average forgets the share B / 4096 a step.

    Damping, ρ, and else α of mixup and p are the row's. Warm-up damping takes at least twice the fewest steps that
    eq. 15 allows, and m_0 is at least 0. The paper has tried the rows alone: farther away they are where a search
    begins.

    Args:
        batch_size: Samples a step over all ranks and backward passes.
        samples: Training samples; default: those of ImageNet.
        epochs: Length of the training; None: that of table 1.

    Raises:
        ValueError: if a number is not allowed.
    """
    fits = type(samples) is int and samples >= 1
    require(fits, "samples", samples, "a whole number >= 1")
    fits = type(batch_size) is int and 1 <= batch_size <= samples
    require(fits, "batch_size", batch_size, f"a whole number from 1 to samples={samples}")
    if epochs is not None:
        check_number("epochs", epochs, "a number > 0, or None", minimum=0, strict=True)
    steps = math.ceil(samples / batch_size)
    row = min(ROWS, key=lambda each: abs(math.log(steps / _steps(each))))
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
    mixes = epochs >= _LEAST_EPOCHS_TO_MIX
    fitted = {
        "batch_size": batch_size,
        "samples": samples,
        "epochs": epochs,
        "start": row.start * epochs / row.epochs,
        "end": _end(row, power) * epochs / row.epochs,
        "power": power,
        "mixup": row.mixup if mixes else 0.0,
        "erasing": LargeBatch.erasing if mixes else 0.0,
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
    """Return p for a training of so many steps."""
    share = min(1.0, steps / (row.epochs * _steps(row)))
    return max(1.0, row.power * math.sqrt(share))


def _end(row: Row, power: float) -> float:
    """Return e_end of the row with another p, so that as much of η_0 is left at its last epoch."""
    if power == row.power:
        return row.end
    left = (1 - (row.epochs - row.start) / (row.end - row.start)) ** (row.power / power)
    return float(row.start + (row.epochs - row.start) / (1 - left))
