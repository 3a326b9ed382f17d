"""Tasks: built-in ones with embedded data, and the papers' applications, which read data sets from a folder."""

from dataclasses import fields
from importlib import import_module

from natgrad.errors import did_you_mean, require, require_one_of
from natgrad.tasks.applications import APPLICATIONS
from natgrad.tasks.base import DataError, Evaluator, Task
from natgrad.tasks.facts import Autoencoder, Digits, Facts, Glyphs, Metric, Poisson, Tabular, Text

__all__ = [
    "DataError",
    "Evaluator",
    "Facts",
    "Metric",
    "Task",
    "built_in",
    "facts_of",
    "get",
    "kind",
    "known_names",
    "names",
]

_BUILT_IN: dict[str, Facts] = {
    facts.name: facts for facts in (Autoencoder(), Digits(), Glyphs(), Poisson(), Tabular(), Text())
}
_FACTS = _BUILT_IN | {facts.name: facts for application in APPLICATIONS for facts in application.all()}


def names() -> list[str]:
    """Return the names of all tasks, sorted."""
    return sorted(_FACTS)


def built_in() -> list[str]:
    """Return the names of the tasks that have embedded data only, sorted."""
    return sorted(_BUILT_IN)


def known_names() -> str:
    """Return the names of all tasks as text for an error."""
    pairs = [f"MODEL of {', '.join(each.models)} and DATA of {', '.join(each.sources)}" for each in APPLICATIONS]
    return f"one of {', '.join(built_in())}; or MODEL-DATA with {'; or '.join(pairs)}"


def facts_of(name: str) -> Facts:
    """Return the facts of a task, one of `names()`, with default options. Does not import torch."""
    return _FACTS[name]


def kind(name: str) -> type[Task]:
    """Return the class of a task, one of `names()`. Imports the task's module, torch and the data sources."""
    title = type(_FACTS[name]).__name__
    found: type[Task] = getattr(import_module(f"{__name__}.{title.lower()}"), title)
    return found


def get(name: str, **options: object) -> Task:
    """Return a task by its name.

    Args:
        name: One of `names()`.
        **options: The task's options, such as `images=1000` for `glyphs` or `data="cifar"` for `resnet20-cifar10`.

    Raises:
        ValueError: No such task, no such option of it, or a value that the option does not allow.
    """
    require(name in _FACTS, "name", name, known_names(), did_you_mean(name, names()))
    facts = _FACTS[name]
    allowed = facts.options()
    for option in options:
        require_one_of("task option", option, *allowed, owner=name)
    decided = {field.name: getattr(facts, field.name) for field in fields(facts) if field.name in facts.fixed}
    return kind(name)(**decided, **options)
