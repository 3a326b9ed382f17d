"""Files of tuned hyper-parameters, with the log of the search."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from natgrad import tasks
from natgrad.errors import ArgumentError, require

from .files import FileError, read_json, replace_text

# Fields that earlier versions wrote.
_REMOVED = {"target", "target_terms"}

COMMITTED = Path(tasks.__file__).parent / "tuned"


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The tuned values of a task.

    Attributes:
        task: The task's name.
        settings: For each contender the fields of its job.
        search: For each contender the settings and the log of its search.
        environment: Machine and versions of the search.
    """

    task: str
    settings: Mapping[str, Mapping[str, Any]]
    search: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def read(task: str, folder: Path = COMMITTED) -> Tuned | None:
    """Return the tuned values of a task, or None.

    Raises:
        ValueError: The file is not a file of tuned values.
        FileError: It is damaged.
    """
    path = folder / f"{task}.json"
    if not path.exists():
        return None
    values = read_json(path)
    names = {each.name for each in fields(Tuned)}
    try:
        require(
            {"task", "settings"} <= set(values) <= names | _REMOVED,
            "fields",
            sorted(values),
            f"of {', '.join(sorted(names))}",
        )
        require(values["task"] == task, "task", values["task"], repr(task))
        for name in names - {"task"}:
            require(isinstance(values.get(name, {}), dict), name, values.get(name), "an object")
        for name in ("settings", "search"):
            for contender, settings in values.get(name, {}).items():
                require(isinstance(settings, dict), f"{name} of {contender}", settings, "an object")
    except ArgumentError as error:
        raise FileError(f"{path}: not a file that a search wrote: {error}") from error
    return Tuned(**{name: values[name] for name in names & set(values)})


def write(tuned: Tuned, folder: Path) -> Path:
    """Write a task's file and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{tuned.task}.json"
    replace_text(path, json.dumps(asdict(tuned), indent=1) + "\n")
    return path
