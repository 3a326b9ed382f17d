"""Tables on the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from .sheets import Sheet


def table(sheet: Sheet) -> Table:
    """Return a sheet as Rich shows it."""
    shown = Table(
        title=sheet.title,
        caption=sheet.caption,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    for index, heading in enumerate(sheet.headings):
        # Where a terminal is too narrow, cells grow longer: nothing is cut off.
        shown.add_column(heading, justify="left" if sheet.prose or index == 0 else "right", overflow="fold")
    for row in sheet.rows:
        shown.add_row(*row)
    return shown
