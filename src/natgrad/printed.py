"""Results that print as a table, and the text of objects in messages."""

from __future__ import annotations

import inspect
import shutil
from abc import ABC, abstractmethod
from typing import Any

from rich.console import Console, RenderableType

_WIDTH, _UNBOUNDED = 120, 10_000


def call_text(instance: object, *shown: str, **arguments: Any) -> str:
    """Return the call that builds an object: texts of its first arguments, and the named ones."""
    parts = [*shown, *(f"{name}={value!r}" for name, value in arguments.items())]
    return f"{type(instance).__name__}({', '.join(parts)})"


def changed(instance: object, kind: type, *names: str) -> list[str]:
    """Return the attributes that differ from the defaults of the constructor of `kind`, as ``name=value``."""
    defaults = inspect.signature(kind).parameters
    values = {name: getattr(instance, name) for name in names}
    return [f"{name}={value!r}" for name, value in values.items() if value != defaults[name].default]


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
