"""The measurements of an analysis."""

from __future__ import annotations

from dataclasses import dataclass, field

from natgrad.training.analysis.drift import Drift
from natgrad.training.analysis.error import DirectionError
from natgrad.training.analysis.norms import EpochNorm
from natgrad.training.analysis.rank import KernelRank
from natgrad.training.analysis.spectra import Eigenvalue

FIGURES = ("rank", "error", "norms", "drift", "spectra")


@dataclass(kw_only=True)
class Measures:
    """The entries of each figure, in the order of measurement.

    Attributes:
        rank: Numerical ranks of kernels.
        error: Errors of KID and KIS.
        norms: Norms of the gradients summed over epochs.
        drift: Relative changes of factors.
        spectra: Eigenvalues of factors.
    """

    rank: list[KernelRank] = field(default_factory=list)
    error: list[DirectionError] = field(default_factory=list)
    norms: list[EpochNorm] = field(default_factory=list)
    drift: list[Drift] = field(default_factory=list)
    spectra: list[Eigenvalue] = field(default_factory=list)
