"""One HTML page of a comparison that needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from natgrad.training import environment
from natgrad.training.compare import Outcome
from natgrad.training.result import replace_text

from .plots import overview, to_svg
from .sheets import comparison_sheets


def write(outcomes: Iterable[Outcome], path: Path) -> None:
    """Write the page: for each task its plots and tables, then machine and versions."""
    templates = Environment(
        loader=PackageLoader("natgrad.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    sections = [
        {
            "task": outcome.task,
            "plot": Markup(to_svg(figure(outcome))),  # our own drawing, not a user's text
            "sheets": comparison_sheets(outcome),
        }
        for outcome in outcomes
    ]
    page = templates.get_template("comparison.html.jinja")
    replace_text(path, page.render(sections=sections, environment=environment.describe()))


def figure(outcome: Outcome) -> Figure:
    """Draw a comparison's curves."""
    curves = {name: [result.points for result in results] for name, results in outcome.results.items()}
    return overview(curves, outcome.task.metric, outcome.target)
