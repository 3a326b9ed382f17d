"""Ready tasks with embedded data: each is real, needs no download, and fits two CPU cores."""

from dataclasses import fields

from natgrad.errors import require
from natgrad.tasks.autoencoder import Autoencoder
from natgrad.tasks.base import Evaluator, Metric, Task
from natgrad.tasks.digits import Digits
from natgrad.tasks.glyphs import Glyphs
from natgrad.tasks.poisson import Poisson
from natgrad.tasks.tabular import Tabular
from natgrad.tasks.text import Text

__all__ = ["Evaluator", "Metric", "Task", "get", "names"]

_TASKS: dict[str, type[Task]] = {task.name: task for task in (Autoencoder, Digits, Glyphs, Poisson, Tabular, Text)}


def names() -> list[str]:
    """Return the names of all tasks, sorted."""
    return sorted(_TASKS)


def get(name: str, **options: object) -> Task:
    """Return a task by its name.

    Args:
        name: One of `names()`.
        **options: The task's own options, each a field of its dataclass, such as `images=1000` for `glyphs`.

    Raises:
        ValueError: No such task, no such option of it, or a value that the option does not allow.
    """
    require(name in _TASKS, "name", name, f"one of {', '.join(names())}")
    task = _TASKS[name]
    allowed = [field.name for field in fields(task)]
    for option in options:
        require(option in allowed, "task option", option, f"one of {name}'s: {', '.join(allowed) or 'it has none'}")
    return task(**options)
