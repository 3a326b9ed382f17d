"""Files of tuned hyper-parameters, with the target that they set and the log of the search."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from natgrad import tasks
from natgrad.errors import ArgumentError

from .result import replace_text
from .summary import Quantity

COMMITTED = Path(tasks.__file__).parent / "tuned"


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The tuned values of a task.

    Attributes:
        task: The task's name.
        settings: For each contender the fields of its job.
        target: Final loss and metric of the tuned reference contender; empty before a comparison has measured them.
        target_terms: The settings that the target applies to: length, batch, schedule and task options.
        search: For each contender the settings and the log of its search.
        environment: Machine and versions of the search.
    """

    task: str
    settings: Mapping[str, Mapping[str, Any]]
    target: Mapping[Quantity, float] = field(default_factory=dict)
    target_terms: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def read(task: str, folder: Path = COMMITTED) -> Tuned | None:
    """Return the tuned values of a task, or None.

    Raises:
        ValueError: The file is not a file of tuned values.
    """
    path = folder / f"{task}.json"
    if not path.exists():
        return None
    try:
        return Tuned(**json.loads(path.read_text()))
    except (json.JSONDecodeError, TypeError) as error:
        raise ArgumentError("tuned", str(path), "a file that a search wrote") from error


def write(tuned: Tuned, folder: Path) -> Path:
    """Write a task's file and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{tuned.task}.json"
    replace_text(path, json.dumps(asdict(tuned), indent=1) + "\n")
    return path
