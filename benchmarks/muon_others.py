"""What Nesterov momentum does for the parameters beside natural Muon's matrices: eleven small tasks off the scoreboard.

``python -m benchmarks.muon_others`` trains natural Muon on the tasks of `benchmarks.muon_factors`, and prints how the
final validation loss changes compared with AdamW as torch has it. The journal is used as there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from unittest import mock

import typer

from benchmarks import open_questions
from benchmarks.common import RESULTS
from benchmarks.muon_factors import TASKS, study
from natgrad.preconditioner.natural_muon import _Update

BASE, NESTEROV = "adamw", "nesterov"


def train(name: str, variant: str, lr: float, seed: int) -> float:
    """Train once; return the final validation loss."""
    task, steps, heads = TASKS[name]
    build = open_questions.natural(head="adamw", heads=heads)
    step = _Update._step_others if variant == NESTEROV else lambda update: update._by_adamw().step()
    with mock.patch.object(_Update, "_step_others", step):
        return open_questions.train(task, build, lr, steps, seed)["loss"]


def main(
    tasks: Annotated[str, typer.Option(help="Names, with commas.")] = ",".join(TASKS),
    seeds: Annotated[int, typer.Option(help="How many to train, from 0.")] = 2,
    journal: Annotated[Path, typer.Option(help="Where runs are noted.")] = RESULTS / "muon_others.jsonl",
) -> None:
    """Run what the journal lacks, and print the table of all that it has."""
    study(tasks, NESTEROV, BASE, seeds, journal, train)


if __name__ == "__main__":
    typer.run(main)
