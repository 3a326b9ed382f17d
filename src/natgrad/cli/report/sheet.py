"""Tables as text and on the terminal, and the table of the tasks, without torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

from natgrad.tasks import Facts
from natgrad.tasks.applications import Application


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A table as text.

    Attributes:
        title: The title.
        headings: The headings of the columns; the first column holds names.
        rows: The cells, as many per row as headings.
        caption: The caption.
        prose: Whether the other columns hold words rather than numbers.
    """

    title: str
    headings: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    prose: bool = False


def task_sheet(tasks: Iterable[Facts]) -> Sheet:
    """Return the table of tasks, with their options and defaults."""
    rows = []
    for task in tasks:
        about = [task.summary, f"{task.metric.name}; {task.epochs} epochs, batch {task.batch_size}"]
        options = ", ".join(f"{name}={getattr(task, name)}" for name in task.options())
        rows.append((task.name, "\n".join([*about, *(["options: " + options] if options else [])])))
    headings = ("task", "data and model; metric; a run; options (--set NAME=VALUE)")
    return Sheet(title="Tasks", headings=headings, rows=rows, prose=True)


def application_sheet(application: type[Application]) -> Sheet:
    """Return the table of an application's models and data sets."""
    models = [
        (name, f"model: {each.title}; {each.epochs} epochs with --data") for name, each in application.models.items()
    ]
    sources = [
        (name, f"data: {each.title}, --data DIR with {each.layout}; without: {each.embedded}")
        for name, each in application.sources.items()
    ]
    every = application.all()
    example = every[0]
    metrics = " or ".join(dict.fromkeys(task.metric.name for task in every))
    batches = " or ".join(dict.fromkeys(str(task.batch_size) for task in every))
    options = ", ".join(f"{name}={getattr(example, name)}" for name in example.options() if name != "data")
    return Sheet(
        title=f"{application.title}: MODEL-DATA, such as {example.name}",
        headings=("MODEL or DATA", f"{metrics}; batch {batches}; options: {options}"),
        rows=[*models, *sources],
        prose=True,
    )


_WIDTH = 100
_NAME = 16  # columns that names of rows are given at least


def wide_console() -> Console:
    """Return a console as wide as the terminal, or without one of ``COLUMNS`` or 100 columns."""
    return Console(markup=False, width=shutil.get_terminal_size((_WIDTH, 0)).columns)


def table(sheet: Sheet) -> Table:
    """Return a sheet as a Rich table."""
    shown = Table(
        title=sheet.title,
        caption=sheet.caption,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    for index, heading in enumerate(sheet.headings):
        # In a narrow terminal cells wrap instead of being cut off, but for names, if they are short.
        names = max((len(row[0]) for row in sheet.rows), default=0) if index == 0 else 0
        justify: Literal["left", "right"] = "left" if sheet.prose or index == 0 else "right"
        shown.add_column(heading, justify=justify, overflow="fold", min_width=min(names, _NAME))
    for row in sheet.rows:
        shown.add_row(*row)
    return shown
