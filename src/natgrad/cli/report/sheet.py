"""A table as text, and that of the tasks: what needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from natgrad.tasks import Facts


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A table as text.

    Attributes:
        title: What it shows.
        headings: Of the columns; the first holds names, the others numbers unless `prose` says otherwise.
        rows: As wide as the headings.
        caption: How to read it.
        prose: Whether the other columns hold words.
    """

    title: str
    headings: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    prose: bool = False


def task_sheet(tasks: Iterable[Facts]) -> Sheet:
    """Return what each task is, and its options with their defaults."""
    rows = []
    for task in tasks:
        about = [task.summary, f"{task.metric.name}; {task.epochs} epochs, batch {task.batch_size}"]
        options = ", ".join(f"{field.name}={getattr(task, field.name)}" for field in fields(task))
        rows.append((task.name, "\n".join([*about, *(["options: " + options] if options else [])])))
    headings = ("task", "data and model; metric; a run; options (--set NAME=VALUE)")
    return Sheet(title="Tasks", headings=headings, rows=rows, prose=True)
