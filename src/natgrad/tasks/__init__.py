"""Built-in tasks with real data that need no download and run on two CPU cores."""

from dataclasses import fields
from importlib import import_module

from natgrad.errors import require
from natgrad.tasks.base import Evaluator, Task
from natgrad.tasks.facts import Autoencoder, Digits, Facts, Glyphs, Metric, Poisson, Tabular, Text

__all__ = ["Evaluator", "Facts", "Metric", "Task", "facts_of", "get", "kind", "names"]

_FACTS: dict[str, type[Facts]] = {facts.name: facts for facts in (Autoencoder, Digits, Glyphs, Poisson, Tabular, Text)}


def names() -> list[str]:
    """Return the names of all tasks, sorted."""
    return sorted(_FACTS)


def facts_of(name: str) -> Facts:
    """Return the facts of a task, one of `names()`, with default options. Does not import torch."""
    return _FACTS[name]()


def kind(name: str) -> type[Task]:
    """Return the class of a task, one of `names()`. Imports the task's module, torch and the data sources."""
    found: type[Task] = getattr(import_module(f"{__name__}.{name}"), _FACTS[name].__name__)
    return found


def get(name: str, **options: object) -> Task:
    """Return a task by its name.

    Args:
        name: One of `names()`.
        **options: The task's options, the fields of its dataclass, such as `images=1000` for `glyphs`.

    Raises:
        ValueError: No such task, no such option of it, or a value that the option does not allow.
    """
    require(name in _FACTS, "name", name, f"one of {', '.join(names())}")
    allowed = [field.name for field in fields(_FACTS[name])]
    for option in options:
        require(option in allowed, "task option", option, f"one of {name}'s: {', '.join(allowed) or 'it has none'}")
    return kind(name)(**options)
