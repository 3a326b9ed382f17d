"""HTML pages without other files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from natgrad.tasks import Task
from natgrad.training import environment
from natgrad.training.compare import TaskComparison
from natgrad.training.files import replace_text
from natgrad.training.summary import targets, verdict

from .plots import overview, to_svg
from .sheet import Sheet
from .sheets import comparison_sheets

_ABOUT = {
    "rank": (
        "Rank of the kernel by batch size",
        "A few rows can represent all if the kernel of samples has a low rank (HyLo, figure 10). A box covers the "
        "middle half of the layers, a line marks the median.",
    ),
    "error": (
        "Error of KID and KIS by rank",
        "The distance of the direction from r selected rows to that from all rows (HyLo, figure 12). Lines are medians "
        "over the layers, bands reach from the best to the worst.",
    ),
    "norms": (
        "Gradients by epoch",
        "HyLo selects by KID in critical epochs, and by KIS in the others (HyLo, figure 11).",
    ),
    "drift": (
        "Drift of the factors by step",
        "The relative change of a factor from one batch to the next (Osawa, figure 5). Bands reach from the 5th "
        "to the 95th and from the 25th to the 75th percentile of the layers.",
    ),
    "spectra": (
        "Spectra of the factors",
        "For one batch, the same at every step. Eigenvalues below 1e-8 of the largest are not shown.",
    ),
}


def write(outcomes: Iterable[TaskComparison], path: Path) -> None:
    """Write the page of a comparison: for each task its plots and tables, then machine and versions."""
    outcomes = list(outcomes)
    sections = [
        {
            "task": outcome.task,
            "plot": Markup(to_svg(figure(outcome))),  # no user input
            "narrow_plot": Markup(to_svg(figure(outcome, narrow=True))),
            "verdict": verdict({outcome.task.name: outcome.shares}),
            "sheets": comparison_sheets(outcome),
        }
        for outcome in outcomes
    ]
    every = verdict({outcome.task.name: outcome.shares for outcome in outcomes}) if len(outcomes) > 1 else ""
    _render("comparison.html.jinja", path, sections=sections, verdict=every)


def write_analysis(
    task: Task, run: str, figures: Mapping[str, Figure], sheets: Mapping[str, list[Sheet]], path: Path
) -> None:
    """Write the page of an analysis: for each figure its plot and tables, then machine and versions.

    Args:
        task: The task.
        run: A description of the run.
        figures: The plots by name.
        sheets: The tables by name of the figure.
        path: The file to write.
    """
    sections = [
        {"heading": heading, "about": about, "plot": Markup(to_svg(figures[name])), "sheets": sheets[name]}
        for name, (heading, about) in _ABOUT.items()
        if name in figures
    ]
    _render("analysis.html.jinja", path, task=task, run=run, sections=sections)


def figure(outcome: TaskComparison, *, narrow: bool = False) -> Figure:
    """Draw a comparison's curves."""
    curves = {name: [result.points for result in results] for name, results in outcome.results.items()}
    return overview(curves, outcome.task.metric, targets(outcome.results, outcome.task.metric), narrow=narrow)


def _render(template: str, path: Path, **values: Any) -> None:
    templates = Environment(
        loader=PackageLoader("natgrad.cli.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    replace_text(path, templates.get_template(template).render(environment=environment.describe(), **values))
