"""The result of a run: one point per evaluation, and how the run ended."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from natgrad.errors import require, require_one_of

from .files import FileError, append_line, read_lines, replace_text

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
        unreadable: The samples that could not be read since the run was started or resumed, and that others replace.
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
    unreadable: int = 0
    averaging: Mapping[str, float | str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Any) -> Point:
        """Build a point from the value of `asdict`.

        Raises:
            ValueError: A field is unknown, missing or of another type.
        """
        require(isinstance(values, dict), "point", values, "an object")
        names = {each.name for each in fields(cls)}
        require(
            names - {"averaging", "unreadable"} <= set(values) <= names,
            "point",
            sorted(values),
            "of the fields of a point",
        )
        for name, value in values.items():
            kinds = {"averaging": dict, "epoch": int, "step": int, "peak_bytes": int, "unreadable": int}.get(
                name, (int, float)
            )
            require(isinstance(value, kinds) and not isinstance(value, bool), name, value, "as natgrad writes it")
        return cls(**values)


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
        """Build a result from the value of `to_json`.

        Raises:
            ValueError: A field is unknown, missing or of another type.
        """
        names = {each.name for each in fields(cls)}
        require({"status", "points"} <= set(values) <= names, "result", sorted(values), "of the fields of a result")
        require_one_of("status", values["status"], *get_args(Status))
        require(isinstance(values["points"], list), "points", values["points"], "a list")
        for name in ("preconditioner", "traffic"):
            numbers = values.get(name, {})
            fits = isinstance(numbers, dict) and all(isinstance(each, int | float) for each in numbers.values())
            require(fits, name, numbers, "an object of numbers")
        return cls(**{**values, "points": [Point.from_json(point) for point in values["points"]]})


def write_points(path: Path, points: Iterable[Point]) -> None:
    """Replace a file by points as JSON lines."""
    replace_text(path, "".join(json.dumps(asdict(point)) + "\n" for point in points))


def append_point(path: Path, point: Point) -> None:
    """Add a point to a file of JSON lines."""
    append_line(path, asdict(point))


def read_points(path: Path) -> list[Point]:
    """Read a file of JSON lines.

    Raises:
        FileError: A line is damaged.
    """
    points = []
    for place, values in read_lines(path):
        try:
            points.append(Point.from_json(values))
        except ValueError as error:
            raise FileError(f"{place}: {error}") from error
    return points
