"""Curves of loss and metric against steps and seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from natgrad.tasks import Metric
from natgrad.training.files import replace_text
from natgrad.training.result import Point
from natgrad.training.summary import Quantity

# Okabe and Ito's colours: readable on black and on white, and by the colour-blind.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
# Line styles and markers, which tell lines apart in print too; the dotted line is the target's.
STYLES = (
    ("-", "o"),
    ((0, (6, 2)), "s"),
    ((0, (6, 2, 1, 2)), "^"),
    ((0, (3, 1.5)), "D"),
    ((0, (9, 2)), "v"),
    ("-", "x"),
)
_MARKERS = 8  # of a line, about
# A placeholder for the text colour of the page around the plot.
TEXT = "#010203"

Curves = Mapping[str, Sequence[Sequence[Point]]]


def overview(
    curves: Curves, metric: Metric, targets: Mapping[Quantity, float] | None = None, *, narrow: bool = False
) -> Figure:
    """Draw loss (above) and metric (below) against steps (left) and seconds (right).

    Args:
        curves: For each name the points of its runs, one run per seed; the plot shows their median, and a band from
            the smallest to the largest.
        metric: The task's metric.
        targets: Values of "loss" and "metric" to mark.
        narrow: Draw all four in one column, for a narrow screen.
    """
    figure = blank(12.0, width=5.0) if narrow else blank(6.4)
    rows: list[tuple[Quantity, str, Callable[[Point], float]]] = [
        ("loss", "training loss", lambda point: point.loss),
        ("metric", f"test {metric.name}", lambda point: point.metric),
    ]
    columns: list[tuple[str, Callable[[Point], float]]] = [
        ("steps", lambda point: point.step),
        ("seconds of training", lambda point: point.seconds),
    ]
    for row, (quantity, label, y) in enumerate(rows):
        for column, (x_label, x) in enumerate(columns):
            axes = figure.add_subplot(*((4, 1) if narrow else (2, 2)), 2 * row + column + 1)
            for index, (name, runs) in enumerate(curves.items()):
                _draw(axes, runs, x, y, name, index)
            if targets and quantity in targets:
                axes.axhline(targets[quantity], color=TEXT, linewidth=0.8, linestyle=":", label="target")
            dress(axes, x_label, label)
            values = [y(point) for runs in curves.values() for run in runs for point in run]
            falls = quantity == "loss" or metric.better == "lower"
            if falls and values and min(values) > 0 and max(values) > 10 * min(values):
                axes.set_yscale("log")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns_of_names = min(len(labels), 3) if narrow else len(labels)
    figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=columns_of_names,
        frameon=False,
        labelcolor=TEXT,
        handlelength=4,
    )
    return figure


def blank(height: float, width: float = 10.0) -> Figure:
    """Return an empty transparent figure of a size in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_alpha(0)
    return figure


def to_svg(figure: Figure, text: str = "currentColor") -> str:
    """Return a figure as an SVG element, with text and axes in the colour `text`."""
    buffer = StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :].replace(TEXT, text)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as an SVG file that is readable on black and on white."""
    replace_text(path, to_svg(figure, text="#808080"))


def _draw(
    axes: Axes,
    runs: Sequence[Sequence[Point]],
    x: Callable[[Point], float],
    y: Callable[[Point], float],
    name: str,
    index: int,
) -> None:
    columns = [[point for point in each if point is not None] for each in zip_longest(*runs)]
    places = [median(x(point) for point in each) for each in columns]
    values = [[y(point) for point in each] for each in columns]
    style, spacing = line_style(index), max(1, len(places) // _MARKERS)
    axes.plot(places, [median(each) for each in values], **style, label=name, markevery=(index % spacing, spacing))
    if len(runs) > 1:
        axes.fill_between(
            places,
            [min(each) for each in values],
            [max(each) for each in values],
            color=style["color"],
            alpha=0.15,
            linewidth=0,
        )


def dress(axes: Axes, x_label: str, y_label: str) -> None:
    """Label the axes, and use the text colour of the page."""
    axes.patch.set_alpha(0)
    axes.set_xlabel(x_label, color=TEXT)
    axes.set_ylabel(y_label, color=TEXT)
    axes.tick_params(which="both", colors=TEXT)
    for spine in axes.spines.values():
        spine.set_color(TEXT)
        spine.set_linewidth(0.6)
    axes.grid(alpha=0.25, linewidth=0.5)


def line_style(index: int) -> dict[str, Any]:
    """Return the colour, line style and marker of the line with a number."""
    dashes, marker = STYLES[index % len(STYLES)]
    colour = COLOURS[index % len(COLOURS)]
    return {"color": colour, "linestyle": dashes, "marker": marker, "markersize": 4, "linewidth": 1.6}
