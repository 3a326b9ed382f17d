"""The result of a run: one point per evaluation, and how the run ended."""

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
        epoch: Completed passes over the training set.
        step: Completed optimizer steps.
        seconds: Training time so far, without evaluations and start-up.
        loss: Mean training loss since the previous point.
        metric: The task's metric on the test set.
        learning_rate: The learning rate of the next step.
        samples_per_second: Training speed of all ranks since the previous point.
        share: The preconditioner's share of the training time so far.
        peak_bytes: The largest memory of any rank so far: resident on a CPU, allocated on a GPU.
        averaging: With averaging over nodes, the averager's phase and metrics on rank 0, and the bytes that all ranks
            have sent so far, inside nodes and between them.
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
    """The result of a run.

    Attributes:
        status: "finished", "stopped" by a signal, or "diverged" to a loss or metric that is not finite.
        points: All evaluations; for a diverged run those before the divergence.
        preconditioner: The preconditioner's metrics at the end.
        traffic: Bytes sent by the preconditioner on rank 0, by kind.
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
        """Build a result from the value of `to_json`."""
        return cls(**{**values, "points": [Point(**point) for point in values["points"]]})


def write_points(path: Path, points: Iterable[Point]) -> None:
    """Replace a file by points as JSON lines."""
    replace_text(path, "".join(_line(point) for point in points))


def append_point(path: Path, point: Point) -> None:
    """Add a point to a file of JSON lines."""
    with path.open("a") as file:
        file.write(_line(point))


def read_points(path: Path) -> list[Point]:
    """Read a file of JSON lines."""
    return [Point(**json.loads(line)) for line in path.read_text().splitlines()]


def replace_text(path: Path, text: str) -> None:
    """Replace the text of a file atomically."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def _line(point: Point) -> str:
    return json.dumps(asdict(point)) + "\n"
