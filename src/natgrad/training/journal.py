"""A file of finished runs of a search or comparison, so that no run is repeated."""

from __future__ import annotations

import json
import os
from pathlib import Path

from natgrad.errors import require

from .files import FileError, append_line, read_lines
from .job import Job
from .result import Result


class Journal:
    """A file of JSON lines, one per finished run, looked up by job.

    Args:
        path: The file; it is read if it exists, and its folder is created.

    Raises:
        FileError: A line is damaged; the file is unchanged.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._results: dict[str, Result] = {}
        if not path.exists():
            return
        for place, entry in read_lines(path):
            try:
                require(set(entry) == {"job", "result"}, "run", sorted(entry), "of the fields job and result")
                for name, values in entry.items():
                    require(isinstance(values, dict), name, values, "an object")
                self._results[_key(Job.from_json(entry["job"]))] = Result.from_json(entry["result"])
            except ValueError as error:
                raise FileError(f"{place}: {error}. Remove the line, and the run is repeated") from error
        _remove_cut_line(path)

    def find(self, job: Job) -> Result | None:
        """Return the result of an equal job, or None."""
        return self._results.get(_key(job))

    def add(self, job: Job, result: Result) -> None:
        """Add a result."""
        self._results[_key(job)] = result
        append_line(self._path, {"job": job.to_json(), "result": result.to_json()})


def _remove_cut_line(path: Path) -> None:
    """Remove a last line that a kill cut.

    Raises:
        FileError: The last line is not one of a journal.
    """
    content = path.read_bytes()
    length = content.rfind(b"\n") + 1
    start, line = b'{"job": {', content[length:]
    if not (line.startswith(start) or start.startswith(line)):
        number = content.count(b"\n") + 1
        raise FileError(f"{path}, line {number}: not a run. Remove the line, or choose another folder")
    if line:
        os.truncate(path, length)


def _key(job: Job) -> str:
    return json.dumps(job.to_json(), sort_keys=True)
