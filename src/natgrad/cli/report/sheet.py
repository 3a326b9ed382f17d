"""Tables as text, and the table of the tasks, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from natgrad.tasks import Facts


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
        options = ", ".join(f"{field.name}={getattr(task, field.name)}" for field in fields(task))
        rows.append((task.name, "\n".join([*about, *(["options: " + options] if options else [])])))
    headings = ("task", "data and model; metric; a run; options (--set NAME=VALUE)")
    return Sheet(title="Tasks", headings=headings, rows=rows, prose=True)
