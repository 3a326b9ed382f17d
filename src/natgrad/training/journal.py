"""A file of finished runs of a search or comparison, so that no run is repeated."""

from __future__ import annotations

import json
from pathlib import Path

from .job import Job
from .result import Result


class Journal:
    """A file of JSON lines, one per finished run, looked up by job.

    Args:
        path: The file; it is read if it exists, and its folder is created.
    """

    def __init__(self, path: Path) -> None:
        """Read the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._results: dict[str, Result] = {}
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # a kill or a full disk cut the last line
            path.write_text(whole)
        for line in whole.splitlines():
            entry = json.loads(line)
            self._results[_key(Job.from_json(entry["job"]))] = Result.from_json(entry["result"])

    def find(self, job: Job) -> Result | None:
        """Return the result of an equal job, or None."""
        return self._results.get(_key(job))

    def add(self, job: Job, result: Result) -> None:
        """Add a result."""
        self._results[_key(job)] = result
        with self._path.open("a") as file:
            file.write(json.dumps({"job": job.to_json(), "result": result.to_json()}) + "\n")


def _key(job: Job) -> str:
    return json.dumps(job.to_json(), sort_keys=True)
