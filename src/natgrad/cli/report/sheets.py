"""The tables of a comparison, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Callable
from math import isinf
from typing import Any

from natgrad.training.compare import TaskComparison
from natgrad.training.contenders import REFERENCE
from natgrad.training.optimizers import split_for_muon
from natgrad.training.summary import QUANTITIES, Crossing, Quantity, Row, Spread, ratio, shares

from .sheet import Sheet

NEVER = "not reached"
_MIB = 2**20


def comparison_sheets(outcome: TaskComparison) -> list[Sheet]:
    """Return tables of the cost to reach each target, of final values, and of hyper-parameters."""
    return [*(_cost(outcome, quantity) for quantity in outcome.target), _end(outcome), _settings(outcome)]


def share_sheet(outcome: TaskComparison) -> Sheet | None:
    """Return the table of what each contender needs beside the reference contender; None without that."""
    found = shares(outcome.results, outcome.task.metric)
    if not found:
        return None
    metric = outcome.task.metric
    of_error = f"test {metric.name}" if metric.better == "lower" else f"1 - test {metric.name}"

    def show(value: float) -> str:
        return NEVER if isinf(value) else f"{value:.2f}"

    return Sheet(
        title=f"{outcome.task.name}: beside {REFERENCE}, whose run is 1",
        headings=("optimizer", "steps", "seconds", "seconds of its run", f"final {of_error}"),
        rows=[
            (name, show(share.steps), show(share.seconds), show(share.whole), show(share.error))
            for name, share in found.items()
        ],
        caption=f"Steps and seconds to {REFERENCE}'s final test {metric.name}. {_reading(outcome)}",
    )


def quantity_name(outcome: TaskComparison, quantity: Quantity) -> str:
    """Return the name of a quantity of a task."""
    return "training loss" if quantity == "loss" else f"test {outcome.task.metric.name}"


def _cost(outcome: TaskComparison, quantity: Quantity) -> Sheet:
    """Return steps, seconds and memory to reach one target, and their ratios to the reference contender's."""
    crossings = {row.name: row.crossings[quantity] for row in outcome.rows}
    reference = crossings.get(REFERENCE)
    parts: list[tuple[Callable[[Crossing], Spread], Callable[[float], str]]] = [
        (lambda crossing: crossing.steps, "{:.0f}".format),
        (lambda crossing: crossing.seconds, "{:.2f}".format),
        (lambda crossing: crossing.peak_bytes, _mebibytes),
    ]
    rows = []
    for row in outcome.rows:
        crossing = crossings[row.name]
        cells = [row.name]
        for part, show in parts:
            share = ratio(part(crossing), part(reference)) if reference else None
            cells += [_spread(part(crossing), show), "-" if share is None else f"{share:.2f}"]
        rows.append((*cells, f"{crossing.reached} of {row.seeds}"))
    against = f"/ {REFERENCE}"
    return Sheet(
        title=f"{outcome.task.name}: to {quantity_name(outcome, quantity)} {outcome.target[quantity]:.4g}",
        headings=("optimizer", "steps", against, "seconds", against, "peak MiB", against, "seeds there"),
        rows=rows,
        caption=f"Target: {outcome.target_origin}. {_reading(outcome)} {_muon_part(outcome)}".rstrip(),
    )


def _end(outcome: TaskComparison) -> Sheet:
    """Return the table of final values."""
    rows = []
    for row in outcome.rows:
        finals = [_spread(row.final[each], "{:.4g}".format) for each in QUANTITIES]
        step = "-" if row.milliseconds is None else f"{row.milliseconds:.1f}"
        rows.append((row.name, *finals, step, f"{row.share:.0%}", f"{row.diverged} of {row.seeds}"))
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
            "preconditioner",
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
    if values is None or isinf(values.median):
        return NEVER if values else "-"
    if values.low == values.high:
        return show(values.median)
    return f"{show(values.median)} ({show(values.low)} to {'never' if isinf(values.high) else show(values.high)})"


def _mebibytes(value: float) -> str:
    return f"{value / _MIB:.0f}"


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
