"""Tables on the terminal."""

from __future__ import annotations

import shutil
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

from .sheet import Sheet

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
