"""Ready tasks with embedded data: each is real, needs no download, and fits two CPU cores."""

from dataclasses import fields
from importlib import import_module

from natgrad.errors import require
from natgrad.tasks.base import Evaluator, Task
from natgrad.tasks.facts import Autoencoder, Digits, Facts, Glyphs, Metric, Poisson, Tabular, Text

__all__ = ["Evaluator", "Facts", "Metric", "Task", "facts_of", "get", "kind", "names"]

_FACTS: dict[str, type[Facts]] = {own.name: own for own in (Autoencoder, Digits, Glyphs, Poisson, Tabular, Text)}


def names() -> list[str]:
    """Return the names of all tasks, sorted."""
    return sorted(_FACTS)


def facts_of(name: str) -> Facts:
    """Return what a task, one of `names()`, says of itself, its options at their defaults; without torch."""
    return _FACTS[name]()


def kind(name: str) -> type[Task]:
    """Return the class of a task, one of `names()`, from the module of its name, which needs torch and its data."""
    found: type[Task] = getattr(import_module(f"{__name__}.{name}"), _FACTS[name].__name__)
    return found


def get(name: str, **options: object) -> Task:
    """Return a task by its name.

    Args:
        name: One of `names()`.
        **options: The task's own options, each a field of its dataclass, such as `images=1000` for `glyphs`.

    Raises:
        ValueError: No such task, no such option of it, or a value that the option does not allow.
    """
    require(name in _FACTS, "name", name, f"one of {', '.join(names())}")
    allowed = [field.name for field in fields(_FACTS[name])]
    for option in options:
        require(option in allowed, "task option", option, f"one of {name}'s: {', '.join(allowed) or 'it has none'}")
    return kind(name)(**options)
