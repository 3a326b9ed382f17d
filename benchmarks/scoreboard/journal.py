"""The journal: a line of JSON for each run and measurement, so that nothing is done twice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scoreboard.run import Result, Spec, record, restore


class Journal:
    """What is known of runs, step times and peak memories.

    Attributes:
        runs: Results by the key of their `Spec`.
        measures: Other lines by kind, task and settings: step times and memory.
    """

    def __init__(self, path: Path) -> None:
        """Read a journal, if there is one. A last line that was cut off is passed over."""
        self.path, self.runs, self.measures = path, dict[str, Result](), dict[tuple[str, str], dict[str, Any]]()
        for line in self._lines():
            if line["kind"] == "run":
                key, result = restore(line)
                self.runs[key] = result
            else:
                self.measures[line["kind"], line["task"]] = line

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for text in self.path.read_text().splitlines():
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                continue

    def add(self, spec: Spec, result: Result) -> None:
        """Write a run."""
        self.runs[spec.key] = result
        self._write(record(spec, result))

    def measure(self, kind: str, task: str, values: dict[str, Any]) -> None:
        """Write another measurement of a task; it replaces an earlier one of its kind."""
        line = {"kind": kind, "task": task, **values}
        self.measures[kind, task] = line
        self._write(line)

    def forget(self, methods: Sequence[str]) -> None:
        """Drop all runs of methods from memory and file, and all measurements, in which methods are compared."""
        lines = [line for line in self._lines() if line["kind"] == "run" and line["method"] not in methods]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.runs = dict(restore(line) for line in lines)
        self.measures.clear()

    def _write(self, line: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
