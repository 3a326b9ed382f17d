"""The names, descriptions and options of tasks, without torch, so that `natgrad tasks` is fast.

The data and model of a task are in the module of its name, in a subclass of its facts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from string import ascii_uppercase, digits
from typing import ClassVar, Literal, TypeAlias

from natgrad.errors import require

Reduction: TypeAlias = Literal["mean", "tokens"]

DIGITS = len(digits)
CHARACTERS = digits + ascii_uppercase
GLYPHS_TEST_SHARE = 4  # training images per test image
TEXT_TEST_EVERY = 8  # one in this many files is in the test set


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The metric of a task on its test set."""

    name: str
    better: Literal["lower", "higher"]

    def reaches(self, value: float, target: float) -> bool:
        """Return whether a value is as good as a target."""
        return value >= target if self.better == "higher" else value <= target


@dataclass(frozen=True, kw_only=True)
class Facts(ABC):
    """The description of a task.

    A subclass sets the attributes below; its dataclass fields are the task's options, except those in `fixed`.

    Attributes:
        curvature_layers: Patterns of the names of modules that a curvature is for; empty: all that it supports.
        fixed: The fields that the task's name decides.
        outputs: The names of the layers nearest to the loss, for natural Muon; empty: it finds one.
        new_parameters: Patterns of the names of the parameters that a run which starts from another does not take over.
    """

    curvature_layers: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[tuple[str, ...]] = ()
    new_parameters: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the task for `natgrad.tasks.get`."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """Data and model in one line."""

    @property
    @abstractmethod
    def likelihood(self) -> Literal["categorical", "bernoulli", "gaussian"] | None:
        """The likelihood of the outputs, for the sampled Fisher; None: the outputs have no single one."""

    @property
    def reduction(self) -> Reduction | Mapping[str, Reduction]:
        """Whether `loss` averages over samples ("mean") or over all their positions ("tokens").

        For a loss of several terms both, by patterns of module names; the task has no likelihood then.
        """
        return "mean"

    @property
    @abstractmethod
    def metric(self) -> Metric:
        """The metric that the evaluator computes."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Default global batch size."""

    @property
    @abstractmethod
    def epochs(self) -> int:
        """Default length of a run, after which a tuned first-order method has nearly converged."""

    @property
    def image_classes(self) -> int | None:
        """The number of classes if inputs are images [C, H, W]; None for other inputs."""
        return None

    @property
    def least_samples(self) -> int:
        """The fewest samples that the model can be trained with at once."""
        return 1

    @property
    def evaluation_batch(self) -> int:
        """Samples that the model is evaluated on at once."""
        return 512

    @property
    def kfac_form(self) -> Literal["inverse"] | None:
        """The form of K-FAC for `natgrad train` where none is given; None: the curvature's default."""
        return None

    @property
    def sync_norm(self) -> bool:
        """Whether batch norm layers use the mean and variance of all ranks that average gradients in each step."""
        return False

    def options(self) -> list[str]:
        """Return the names of the task's options."""
        return [field.name for field in fields(self) if field.name not in self.fixed]


# The largest number of samples or units, far beyond what fits into memory.
_MOST = 10**12


def at_least(least: int, **options: object) -> None:
    """Check that options are whole numbers of at least `least` and at most 10^12.

    Raises:
        ValueError: One of them is not.
    """
    for name, value in options.items():
        fits = type(value) is int and least <= value <= _MOST
        require(fits, name, value, f"a whole number of at least {least}, at most {_MOST}")


@dataclass(frozen=True, kw_only=True)
class Autoencoder(Facts):
    """Handwritten digits through a code of 8 numbers (after Hinton & Salakhutdinov 2006)."""

    name: ClassVar[str] = "autoencoder"
    summary: ClassVar[str] = "handwritten digits 8x8, twelve-layer autoencoder"
    likelihood: ClassVar[Literal["bernoulli"]] = "bernoulli"
    metric: ClassVar[Metric] = Metric(name="reconstruction loss", better="lower")
    batch_size: ClassVar[int] = 512
    epochs: ClassVar[int] = 400


@dataclass(frozen=True, kw_only=True)
class Digits(Facts):
    """1797 scans of 8x8 pixels, ten classes."""

    name: ClassVar[str] = "digits"
    summary: ClassVar[str] = "handwritten digits 8x8, four-layer convolutional network"
    likelihood: ClassVar[Literal["categorical"]] = "categorical"
    metric: ClassVar[Metric] = Metric(name="accuracy", better="higher")
    image_classes: ClassVar[int | None] = DIGITS
    batch_size: ClassVar[int] = 128
    epochs: ClassVar[int] = 20


@dataclass(frozen=True, kw_only=True)
class Glyphs(Facts):
    """Digits and capitals in colour, 36 classes; the test fonts are unseen.

    Attributes:
        images: Training images; a quarter as many for testing.
        depth: Layers of the residual network, 20 or 32.
        seed: The seed of the rendering.
    """

    name: ClassVar[str] = "glyphs"
    summary: ClassVar[str] = "characters over photographs 32x32, ResNet-20 or 32"
    likelihood: ClassVar[Literal["categorical"]] = "categorical"
    metric: ClassVar[Metric] = Metric(name="accuracy", better="higher")
    image_classes: ClassVar[int | None] = len(CHARACTERS)
    batch_size: ClassVar[int] = 128
    epochs: ClassVar[int] = 5

    images: int = 4096
    depth: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(GLYPHS_TEST_SHARE, images=self.images)
        require(self.depth in (20, 32), "depth", self.depth, "20 or 32")
        at_least(0, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class Poisson(Facts):
    """-Δu = f on the unit square with Dirichlet boundary values and the solution u = cos(πx) cos(2πy).

    A sample is a point inside or on the boundary. The test set has u on a grid, so that the metric is the relative
    error of the solution.

    Attributes:
        interior: Training points inside the square.
        boundary: Training points on its edges.
        width: Hidden units per layer.
        depth: Hidden layers.
    """

    name: ClassVar[str] = "poisson"
    summary: ClassVar[str] = "Poisson's equation on the unit square, physics-informed network"
    likelihood: ClassVar[Literal["gaussian"]] = "gaussian"
    metric: ClassVar[Metric] = Metric(name="relative L2 error", better="lower")
    batch_size: ClassVar[int] = 512
    epochs: ClassVar[int] = 300

    interior: int = 1536
    boundary: int = 512
    width: int = 64
    depth: int = 4

    def __post_init__(self) -> None:
        at_least(1, interior=self.interior, boundary=self.boundary, width=self.width, depth=self.depth)


@dataclass(frozen=True, kw_only=True)
class Tabular(Facts):
    """Thirty measurements of cell nuclei of 569 patients: malignant (0) or benign (1)."""

    name: ClassVar[str] = "tabular"
    summary: ClassVar[str] = "breast cancer measurements, multilayer perceptron"
    likelihood: ClassVar[Literal["categorical"]] = "categorical"
    metric: ClassVar[Metric] = Metric(name="accuracy", better="higher")
    batch_size: ClassVar[int] = 64
    epochs: ClassVar[int] = 30


@dataclass(frozen=True, kw_only=True)
class Text(Facts):
    """The next byte of the standard library's sources, split by file. Other Python versions have other sources.

    Attributes:
        sequences: Training windows, evenly spaced over the training files; an eighth as many for testing.
        context: Bytes per window.
        layers: Transformer blocks.
        width: Features per position.
        heads: Attention heads, a divisor of `width`.
    """

    name: ClassVar[str] = "text"
    summary: ClassVar[str] = "Python's standard library byte by byte, causal transformer"
    likelihood: ClassVar[Literal["categorical"]] = "categorical"
    reduction: ClassVar[Literal["tokens"]] = "tokens"
    metric: ClassVar[Metric] = Metric(name="bits per byte", better="lower")
    batch_size: ClassVar[int] = 32
    epochs: ClassVar[int] = 3

    sequences: int = 4096
    context: int = 128
    layers: int = 2
    width: int = 128
    heads: int = 4

    def __post_init__(self) -> None:
        at_least(TEXT_TEST_EVERY, sequences=self.sequences)
        at_least(1, context=self.context, layers=self.layers, width=self.width, heads=self.heads)
        require(self.width % self.heads == 0, "heads", self.heads, f"a divisor of width={self.width}")
