"""The figures of an analysis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isfinite, isnan, nan
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from natgrad.training.analysis import Measures
from natgrad.training.analysis.error import METHODS, DirectionError
from natgrad.training.analysis.factors import Drift, Eigenvalue
from natgrad.training.analysis.norms import ALL, EpochNorm
from natgrad.training.analysis.rank import KernelRank

from .plots import COLOURS, TEXT, blank, dress, line_style

_FLOOR = 1e-16  # smaller values are rounding errors; logarithmic axes start here
_EXACT = 1e-8
_PANELS = 3
_PERCENTILES = (5, 25, 50, 75, 95)
_HEIGHT = 3.4


def figures(measures: Measures) -> dict[str, Figure]:
    """Draw each figure that has entries."""
    drawers: dict[str, Callable[[Any], Figure]] = {
        "rank": rank_figure,
        "error": error_figure,
        "norms": norms_figure,
        "drift": drift_figure,
        "spectra": spectra_figure,
    }
    return {name: draw(getattr(measures, name)) for name, draw in drawers.items() if getattr(measures, name)}


def rank_figure(entries: Sequence[KernelRank]) -> Figure:
    """Draw the distribution of ranks over layers by batch size, one panel per snapshot."""
    figure = blank(_HEIGHT)
    entries = [each for each in entries if not isnan(each.rank)]
    for axes, step in _panels(figure, entries):
        own = [each for each in entries if each.step == step]
        sizes = sorted({each.batch_size for each in own})
        line = {"color": COLOURS[0]}
        axes.boxplot(
            [[each.rank for each in own if each.batch_size == size] for size in sizes],
            tick_labels=[str(size) for size in sizes],
            boxprops=line,
            whiskerprops=line,
            capprops=line,
            medianprops={"color": COLOURS[4]},
            flierprops={"markeredgecolor": COLOURS[0], "markersize": 4},
        )
        dress(axes, "batch size", "numerical rank of a layer's kernel")
    return figure


def error_figure(entries: Sequence[DirectionError]) -> Figure:
    """Draw the errors of both methods by rank: the median over layers and its range, one panel per snapshot."""
    figure = blank(_HEIGHT)
    for axes, step in _panels(figure, entries):
        for index, method in enumerate(METHODS):
            own = [each for each in entries if (each.step, each.method) == (step, method)]
            places = sorted({each.rank for each in own})
            values = [[max(each.error, _FLOOR) for each in own if each.rank == rank] for rank in places]
            _draw_spread(axes, places, values, (0, 50, 100), index, method.upper())
        dress(axes, "rank r", "error of the direction")
        axes.set_xscale("log")
        axes.set_yscale("log")
        if axes.get_ylim()[0] < _EXACT:  # with all rows only rounding errors are left
            axes.set_ylim(bottom=_EXACT)
    _name_lines(figure)
    return figure


def norms_figure(entries: Sequence[EpochNorm]) -> Figure:
    """Draw the norms by epoch, of each layer and of all, with the critical epochs shaded."""
    figure = blank(_HEIGHT)
    axes = figure.add_subplot()
    layers = list(dict.fromkeys(each.layer for each in entries))
    for colour, layer in zip(_shades(len(layers)), layers, strict=True):
        own = [each for each in entries if each.layer == layer]
        every = layer == ALL
        axes.plot(
            [each.epoch for each in own],
            [each.norm for each in own],
            color=TEXT if every else colour,
            linewidth=2 if every else 0.9,
            marker="." if len(own) < 3 else None,
            label="all parameters" if every else None,
        )
    for each in entries:
        if each.layer == ALL and each.critical:
            axes.axvspan(each.epoch - 0.5, each.epoch + 0.5, color=COLOURS[1], alpha=0.18, linewidth=0)
    dress(axes, "epoch (shaded: critical; layers: first dark, last light)", "norm of the epoch's summed gradient")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _name_lines(figure)
    return figure


def drift_figure(entries: Sequence[Drift]) -> Figure:
    """Draw percentiles over the layers of the drift of A and of G by step."""
    figure = blank(_HEIGHT)
    first: Axes | None = None
    for column, factor in enumerate(("A", "G")):
        axes = figure.add_subplot(1, 2, column + 1, sharey=first)
        first = first or axes
        own = [each for each in entries if each.factor == factor]
        steps = sorted({each.step for each in own})
        values = [[max(each.drift, _FLOOR) for each in own if each.step == step] for step in steps]
        _draw_spread(axes, steps, values, _PERCENTILES, column, factor)
        dress(axes, "step", f"relative change of {factor}")
        axes.set_yscale("log")
    return figure


def spectra_figure(entries: Sequence[Eigenvalue]) -> Figure:
    """Draw the eigenvalues of A (above) and G (below), one line per layer and one panel per snapshot."""
    figure = blank(2 * _HEIGHT)
    layers = list(dict.fromkeys(each.layer for each in entries))
    lines: dict[tuple[int, str, str], list[float]] = {}
    for each in entries:
        lines.setdefault((each.step, each.factor, each.layer), []).append(each.eigenvalue)
    for row, factor in enumerate("AG"):
        for axes, step in _panels(figure, entries, rows=2, row=row):
            for colour, layer in zip(_shades(len(layers)), layers, strict=True):
                values = lines.get((step, factor, layer), [])
                kept = [value for value in values if value > 1e-8 * values[0]]  # the precision of float32
                axes.plot(range(1, len(kept) + 1), kept, color=colour, linewidth=1, marker="." if len(kept) < 3 else "")
            dress(axes, "index (layers: first dark, last light)", f"eigenvalues of {factor}")
            axes.set_xscale("log")
            axes.set_yscale("log")
    return figure


def _panels(figure: Figure, entries: Sequence[Any], rows: int = 1, row: int = 0) -> Iterable[tuple[Axes, int]]:
    """Yield axes side by side for a few of the snapshots, including the first and the last."""
    steps = sorted({each.step for each in entries})
    count = min(_PANELS, len(steps))
    chosen = [steps[round(index * (len(steps) - 1) / max(1, count - 1))] for index in range(count)]
    first: Axes | None = None
    for column, step in enumerate(chosen):
        axes = figure.add_subplot(rows, count, row * count + column + 1, sharey=first)
        first = first or axes
        axes.set_title(f"after {step} steps", color=TEXT, fontsize=10)
        yield axes, step


def _draw_spread(
    axes: Axes, x: Sequence[int], values: Sequence[Sequence[float]], percentiles: Sequence[int], index: int, name: str
) -> None:
    """Draw a line of medians, and bands between symmetric percentiles."""
    known = [[value for value in each if isfinite(value)] or [nan] for each in values]
    marks = np.array([np.percentile(each, percentiles) for each in known]).T
    style = line_style(index)
    axes.plot(x, marks[len(marks) // 2], **style, markevery=max(1, len(x) // 8), label=name)
    for low, high in zip(marks[: len(marks) // 2], marks[: len(marks) // 2 : -1], strict=True):
        axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def _name_lines(figure: Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, labelcolor=TEXT)


def _shades(count: int) -> list[Any]:
    """Return colours from dark to light that are visible on black and on white."""
    return [colormaps["viridis"](0.1 + 0.75 * index / max(1, count - 1)) for index in range(count)]
