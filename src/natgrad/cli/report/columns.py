"""The measurements of an analysis as CSV files, one per figure."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

from natgrad.training.analysis import FIGURES, Measures
from natgrad.training.files import replace_text


def write(measures: Measures, folder: Path) -> list[Path]:
    """Write a file for each figure that has entries, and return the paths."""
    written = []
    for figure in FIGURES:
        entries: Sequence[Any] = getattr(measures, figure)
        if entries:
            written.append(folder / f"{figure}.csv")
            replace_text(written[-1], _text(entries))
    return written


def _text(entries: Sequence[Any]) -> str:
    rows = [asdict(entry) for entry in entries]
    text = StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _plain(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _plain(value: Any) -> Any:
    """Return booleans as 1 and 0; None becomes an empty cell."""
    return int(value) if isinstance(value, bool) else value
