"""The measurements of an analysis, and their CSV files, one for each figure."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from natgrad.training.analysis.error import DirectionError
from natgrad.training.analysis.factors import Drift, Eigenvalue
from natgrad.training.analysis.norms import EpochNorm
from natgrad.training.analysis.rank import KernelRank
from natgrad.training.files import replace_text

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


def write_columns(measures: Measures, folder: Path) -> list[Path]:
    """Write a file for each figure that has entries, and return the paths."""
    written = []
    for figure in FIGURES:
        entries: Sequence[Any] = getattr(measures, figure)
        if entries:
            written.append(folder / f"{figure}.csv")
            replace_text(written[-1], _text(entries))
    return written


def _text(entries: Sequence[Any]) -> str:
    rows = [asdict(entry) for entry in entries]
    text = StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _plain(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _plain(value: Any) -> Any:
    """Return booleans as 1 and 0; None becomes an empty cell."""
    return int(value) if isinstance(value, bool) else value
