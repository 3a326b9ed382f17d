"""The tables of a comparison, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Callable
from math import isinf
from typing import Any

from natgrad.training.compare import TaskComparison
from natgrad.training.contenders import REFERENCE
from natgrad.training.optimizers import split_for_muon
from natgrad.training.summary import QUANTITIES, Row, Spread

from .sheet import Sheet

NEVER = "not reached"
_MIB = 2**20


def comparison_sheets(outcome: TaskComparison) -> list[Sheet]:
    """Return tables of what each contender needs beside the reference contender, of final values and of settings."""
    return [*([_comparison(outcome)] if outcome.shares else []), _end(outcome), _settings(outcome)]


def _comparison(outcome: TaskComparison) -> Sheet:
    """Return the table of steps and seconds to the reference contender's final test metric, as shares of its run."""
    metric = outcome.task.metric
    of_error = f"test {metric.name}" if metric.better == "lower" else f"1 - test {metric.name}"

    def show(value: float) -> str:
        return NEVER if isinf(value) else f"{value:.2f}"

    return Sheet(
        title=f"{outcome.task.name}: beside {REFERENCE}, whose run is 1",
        headings=("optimizer", "steps", "seconds", "seconds of its run", f"final {of_error}"),
        rows=[
            (name, show(share.steps), show(share.seconds), show(share.run_seconds), show(share.error))
            for name, share in outcome.shares.items()
        ],
        caption=f"Steps and seconds to {REFERENCE}'s final test {metric.name}. {_reading(outcome)}",
    )


def _end(outcome: TaskComparison) -> Sheet:
    """Return the table of final values."""
    rows = []
    for row in outcome.rows:
        finals = [_spread(row.final[each], "{:.4g}".format) for each in QUANTITIES]
        step = "-" if row.milliseconds is None else f"{row.milliseconds:.1f}"
        memory = "-" if row.peak_bytes is None else f"{row.peak_bytes / _MIB:.0f}"
        rows.append((row.name, *finals, step, f"{row.share:.0%}", memory, f"{row.diverged} of {row.seeds}"))
    job = outcome.job
    length = f"{job.epochs} epochs" if job.epochs else f"{job.steps} steps"
    metric = outcome.task.metric
    return Sheet(
        title=f"{outcome.task.name}: after {length}",
        headings=(
            "optimizer",
            "training loss",
            f"test {metric.name} ({metric.better} is better)",
            "ms a step",
            "natgrad's share",
            "peak MiB",
            "diverged",
        ),
        rows=rows,
        caption=f"Batch {job.batch_size} on {job.workers} rank(s), {job.schedule} learning rate. {_reading(outcome)}",
    )


def _settings(outcome: TaskComparison) -> Sheet:
    """Return the table of hyper-parameters and of the trials that found them."""
    rows = []
    for row in outcome.rows:
        entry = outcome.known.search.get(row.name) if outcome.known else None
        found = f"{entry['trials']} trials by final {entry['objective']}" if entry else "not searched"
        rows.append((row.name, settings_text(row), found))
    return Sheet(
        title=f"{outcome.task.name}: hyper-parameters",
        headings=("optimizer", "settings", "found by"),
        rows=rows,
        caption=_muon_part(outcome),
        prose=True,
    )


def settings_text(row: Row) -> str:
    """Return a contender's settings in one line."""
    pairs: dict[str, Any] = {}
    for name, value in row.settings.items():
        pairs.update(value if isinstance(value, dict) else {name: value})
    return ", ".join(f"{name.replace('_', ' ')} {_number(value)}" for name, value in pairs.items())


def _muon_part(outcome: TaskComparison) -> str:
    """Return a sentence on how many parameters Muon trains."""
    if all(row.settings["optimizer"] != "muon" for row in outcome.rows):
        return ""
    matrices, others = (sum(each.numel() for each in part) for part in split_for_muon(outcome.task.model()))
    none = "" if matrices else " Here it is AdamW."
    return (
        f"Muon takes the weights of linear layers and convolutions but the last, {matrices:,} of the "
        f"{matrices + others:,} parameters; AdamW the others.{none}"
    )


def _reading(outcome: TaskComparison) -> str:
    seeds, first = max(row.seeds for row in outcome.rows), outcome.job.seed
    return f"Seed {first}." if seeds == 1 else f"Median of seeds {first} to {first + seeds - 1} (least to greatest)."


def _spread(values: Spread | None, show: Callable[[float], str]) -> str:
    if values is None:
        return "-"
    if values.low == values.high:
        return show(values.median)
    return f"{show(values.median)} ({show(values.low)} to {show(values.high)})"


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
