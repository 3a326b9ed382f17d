"""The power of natural Muon's roots and their damping: eleven small tasks off the scoreboard.

``python -m benchmarks.muon_damping`` trains natural Muon on the tasks of `benchmarks.muon_factors`, and prints how the
final validation loss changes compared with power 0.25 and damping 0.01. A variant is called by power and damping. The
journal is used as there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks import open_questions
from benchmarks.common import RESULTS
from benchmarks.muon_factors import TASKS, study

BASE = "0.25-0.01"
VARIANTS = ("0.2-0.01", "0.3-0.01", "0.35-0.01", "0.25-0.001", "0.25-0.003", "0.25-0.03", "0.3-0.003")


def train(name: str, variant: str, lr: float, seed: int) -> float:
    """Train once; return the final validation loss."""
    task, steps, heads = TASKS[name]
    power, damping = map(float, variant.split("-"))
    build = open_questions.natural(head="adamw", heads=heads, power=power, damping=damping)
    return open_questions.train(task, build, lr, steps, seed)["loss"]


def main(
    tasks: Annotated[str, typer.Option(help="Names, with commas.")] = ",".join(
        name for name in TASKS if name != "gpt600"
    ),
    variants: Annotated[str, typer.Option(help="With commas; compared with 0.25-0.01.")] = ",".join(VARIANTS),
    seeds: Annotated[int, typer.Option(help="How many to train, from 0.")] = 3,
    journal: Annotated[Path, typer.Option(help="Where runs are noted.")] = RESULTS / "muon_damping.jsonl",
) -> None:
    """Run what the journal lacks, and print the table of all that it has."""
    study(tasks, variants, BASE, seeds, journal, train)


if __name__ == "__main__":
    typer.run(main)
