"""The large-batch recipe of Osawa 2019, and other parts of the papers' trainings; each works in any script."""

from natgrad.recipes.erasing import ZeroErasing as ZeroErasing
from natgrad.recipes.heavy_ball import HeavyBall as HeavyBall
from natgrad.recipes.large_batch import LargeBatch as LargeBatch
from natgrad.recipes.large_batch import large_batch as large_batch
from natgrad.recipes.mixup import RunningMixup as RunningMixup
from natgrad.recipes.mixup import soft_labels as soft_labels
from natgrad.recipes.schedules import STEP_DECAYS as STEP_DECAYS
from natgrad.recipes.schedules import PolynomialDecay as PolynomialDecay
from natgrad.recipes.schedules import StepDecay as StepDecay
from natgrad.recipes.weights import CenteredDecay as CenteredDecay
from natgrad.recipes.weights import WeightRescaling as WeightRescaling

__all__ = [
    "STEP_DECAYS",
    "CenteredDecay",
    "HeavyBall",
    "LargeBatch",
    "PolynomialDecay",
    "RunningMixup",
    "StepDecay",
    "WeightRescaling",
    "ZeroErasing",
    "large_batch",
    "soft_labels",
]
