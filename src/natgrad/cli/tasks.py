"""`natgrad tasks`: list the tasks."""

from __future__ import annotations


def tasks() -> None:
    """List the built-in tasks."""
    from natgrad import tasks
    from natgrad.cli.report.sheet import task_sheet
    from natgrad.cli.report.tables import table, wide_console

    wide_console().print(table(task_sheet(tasks.facts_of(name) for name in tasks.names())))
