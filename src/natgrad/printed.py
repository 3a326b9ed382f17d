"""Base class of results that print as a table."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod

from rich.console import Console, RenderableType

_WIDTH, _UNBOUNDED = 120, 10_000


class Printed(ABC):
    """A table, rendered by Rich; ``str()`` returns plain text as wide as the terminal, or as names need."""

    @abstractmethod
    def __rich__(self) -> RenderableType:
        """Return the table."""

    def __str__(self) -> str:
        width = max(80, shutil.get_terminal_size((_WIDTH, 0)).columns)
        needed = Console(width=_UNBOUNDED).measure(self).minimum
        console = Console(width=max(width, needed), color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get()
