"""The tables of an analysis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite, isnan
from statistics import median
from typing import Any

import numpy as np
import torch

from natgrad.training.analysis import Measures
from natgrad.training.analysis.error import DRAWS, METHODS, DirectionError
from natgrad.training.analysis.factors import Drift, Eigenvalue
from natgrad.training.analysis.norms import ALL, EpochNorm
from natgrad.training.analysis.rank import SHARE, KernelRank, leading

from .sheet import Sheet

_LINES = 10  # the largest number of steps or epochs in a table
_SHOWN_SHARE = 0.1  # the share of rows for which layers are compared, HyLo's default


def measured_sheets(measures: Measures) -> dict[str, list[Sheet]]:
    """Return the tables of each figure that has entries."""
    makers: dict[str, Callable[[Any], list[Sheet]]] = {
        "rank": _rank,
        "error": _error,
        "norms": _norms,
        "drift": _drift,
        "spectra": _spectra,
    }
    return {name: make(getattr(measures, name)) for name, make in makers.items() if getattr(measures, name)}


def _rank(entries: Sequence[KernelRank]) -> list[Sheet]:
    steps = _steps(entries)
    last = [each for each in entries if each.step == steps[-1]]
    sizes = sorted({each.batch_size for each in last})
    found = {(each.layer, each.batch_size): each for each in last}
    rows = [
        (layer, *(f"{found[layer, size].rank:g}" if (layer, size) in found else "-" for size in sizes))
        for layer in _layers(last)
    ]
    for step in steps:
        middles = [_median(each.rank for each in entries if (each.step, each.batch_size) == (step, s)) for s in sizes]
        shares = [f"{middle:g} ({middle / size:.0%})" for middle, size in zip(middles, sizes, strict=True)]
        rows.append((f"median, step {step}", *shares))
    caption = f"Eigenvalues of (AAᵀ)∘(GGᵀ) that make up {SHARE:.0%} of their sum; in brackets the share of the batch."
    title = f"Numerical rank of the kernel after {steps[-1]} steps, by batch size"
    return [Sheet(title=title, headings=("layer", *map(str, sizes)), rows=rows, caption=caption)]


def _error(entries: Sequence[DirectionError]) -> list[Sheet]:
    steps, ranks = _steps(entries), sorted({each.rank for each in entries})
    size, damping = max(each.batch_size for each in entries), entries[0].damping
    chosen = steps if len(steps) <= 3 else [steps[0], steps[len(steps) // 2], steps[-1]]
    rows = []
    for rank in ranks:
        cells = [
            _median(each.error for each in entries if (each.step, each.rank, each.method) == (step, rank, method))
            for step in chosen
            for method in METHODS
        ]
        rows.append((str(rank), *(f"{cell:.2g}" for cell in cells)))
    headings = ("r", *(f"{method.upper()}, step {step}" for step in chosen for method in METHODS))
    caption = (
        f"Relative to the exact SNGD direction of a batch of {size}, damping {damping:g}; KIS: mean of {DRAWS} draws."
    )
    by_rank = Sheet(
        title="Error of the direction, the median over layers", headings=headings, rows=rows, caption=caption
    )
    shown = min(ranks, key=lambda rank: abs(rank - _SHOWN_SHARE * size))
    last: dict[tuple[str, str], float] = {
        (each.layer, each.method): each.error for each in entries if (each.step, each.rank) == (steps[-1], shown)
    }
    rows = []
    for layer in dict.fromkeys(layer for layer, _ in last):
        kid, kis = (last[layer, method] for method in METHODS)
        rows.append((layer, f"{kid:.2g}", f"{kis:.2g}", f"{kis / kid:.2g}" if kid else "-"))
    title = f"The same of each layer with r = {shown}, after {steps[-1]} steps"
    return [by_rank, Sheet(title=title, headings=("layer", "KID", "KIS", "KIS / KID"), rows=rows)]


def _norms(entries: Sequence[EpochNorm]) -> list[Sheet]:
    every = [each for each in entries if each.layer == ALL]
    rows = [
        (
            str(each.epoch),
            f"{each.norm:.4g}",
            "-" if each.change is None else f"{each.change:.2f}",
            f"{each.learning_rate:.3g}",
            "KID" if each.critical else "KIS",
        )
        for each in _thinned(every)
    ]
    critical = [each.epoch for each in every if each.critical]
    caption = f"Critical, so that HyLo would choose KID: {_ranges(critical)}; {len(critical)} of {len(every)} epochs."
    headings = ("epoch", "norm", "change", "learning rate", "switch")
    title = "The gradient of all parameters, summed over an epoch"
    return [Sheet(title=title, headings=headings, rows=rows, caption=caption)]


def _drift(entries: Sequence[Drift]) -> list[Sheet]:
    rows = []
    for step in _thinned(_steps(entries)):
        cells = []
        for factor in "AG":
            values = [each.drift for each in entries if (each.step, each.factor) == (step, factor)]
            known = [value for value in values if isfinite(value)]
            low, middle, high = np.percentile(known or [float("nan")], (5, 50, 95))
            cells.append(f"{middle:.3g} ({low:.2g} to {high:.2g})" if known else "-")
        rows.append((str(step), *cells))
    caption = "‖X_t - X_t₋₁‖ / ‖X_t₋₁‖ (Frobenius) of the factors of single batches: median over layers (5 to 95 %)."
    headings = ("step", "A", "G")
    return [Sheet(title="Change of the factors from step to step", headings=headings, rows=rows, caption=caption)]


def _spectra(entries: Sequence[Eigenvalue]) -> list[Sheet]:
    step = _steps(entries)[-1]
    values: dict[tuple[str, str], list[float]] = {}
    for each in entries:
        if each.step == step:
            values.setdefault((each.layer, each.factor), []).append(each.eigenvalue)
    rows = []
    for layer in dict.fromkeys(layer for layer, _ in values):
        cells: list[str] = []
        for factor in "AG":
            own = values.get((layer, factor), [])
            count = int(leading(torch.tensor(own or [0.0], dtype=torch.float64)))
            cells += [str(len(own)), f"{own[0]:.2g}", str(count)] if own else ["-"] * 3
        rows.append((layer, *cells))
    share = f"{SHARE:.0%}"
    return [
        Sheet(
            title=f"Eigenvalues of the factors after {step} steps",
            headings=("layer", "of A", "largest", share, "of G", "largest", share),
            rows=rows,
            caption=f"How many there are, the largest, and how many of the largest make up {share} of the sum.",
        )
    ]


def _steps(entries: Sequence[Any]) -> list[int]:
    return sorted({each.step for each in entries})


def _layers(entries: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(each.layer for each in entries))


def _median(values: Any) -> float:
    known = [value for value in values if not isnan(value)]
    return median(known) if known else float("nan")


def _thinned(entries: Sequence[Any]) -> list[Any]:
    """Return a few evenly spaced entries, including the first and the last."""
    count = min(_LINES, len(entries))
    return [entries[round(index * (len(entries) - 1) / max(1, count - 1))] for index in range(count)]


def _ranges(numbers: Sequence[int]) -> str:
    """Return whole numbers as text, such as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs) or "none"
