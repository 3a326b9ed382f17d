"""Base class of results that print as a table."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod

from rich.console import Console
from rich.table import Table

_WIDTH = 120


class Printed(ABC):
    """A table, rendered by Rich; ``str()`` returns plain text as wide as the terminal."""

    @abstractmethod
    def __rich__(self) -> Table:
        """Return the table."""

    def __str__(self) -> str:
        console = Console(width=max(80, shutil.get_terminal_size((_WIDTH, 0)).columns), color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get()
