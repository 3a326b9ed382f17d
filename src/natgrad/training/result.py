"""What a run leaves behind: one point an evaluation, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["finished", "stopped", "diverged"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One evaluation.

    Attributes:
        epoch: Passes over the training set so far.
        step: Optimizer steps so far.
        seconds: Spent on training so far, evaluation and start-up left out.
        loss: Mean training loss since the previous point.
        metric: The task's metric on the test set.
        learning_rate: At the last step.
        samples_per_second: Training speed since the previous point, all ranks together.
        share: The preconditioner's part of the training time so far.
        peak_bytes: Largest memory of any rank so far: resident on a CPU, allocated on a GPU.
        averaging: How nodes average, where they do: the averager's phase and metrics on the leading rank, and the bytes
            that the averagers of all ranks have sent so far, inside nodes and between them.
    """

    epoch: int
    step: int
    seconds: float
    loss: float
    metric: float
    learning_rate: float
    samples_per_second: float
    share: float
    peak_bytes: int
    averaging: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run's end.

    Attributes:
        status: "finished", "stopped" by a signal, or "diverged" to a loss or metric that is no number.
        points: Every evaluation; a diverged run keeps those before.
        preconditioner: The preconditioner's own counts at the end.
        traffic: Bytes that the leading rank's preconditioner sent, by kind.
    """

    status: Status
    points: list[Point]
    preconditioner: dict[str, float] = field(default_factory=dict)
    traffic: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Result:
        """Build the result that `to_json` described."""
        return cls(**{**values, "points": [Point(**point) for point in values["points"]]})


def write_points(path: Path, points: Iterable[Point]) -> None:
    """Write points as JSON lines in place of what the file held."""
    replace_text(path, "".join(_line(point) for point in points))


def append_point(path: Path, point: Point) -> None:
    """Add a point to a file of JSON lines."""
    with path.open("a") as file:
        file.write(_line(point))


def read_points(path: Path) -> list[Point]:
    """Read a file of JSON lines."""
    return [Point(**json.loads(line)) for line in path.read_text().splitlines()]


def replace_text(path: Path, text: str) -> None:
    """Write a file in one piece: whoever reads it sees the old text or the new one, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def _line(point: Point) -> str:
    return json.dumps(asdict(point)) + "\n"
