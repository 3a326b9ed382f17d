"""How seldom natural Muon may refresh, and with how few Newton-Schulz steps: eleven small tasks off the scoreboard.

``python -m benchmarks.muon_refresh`` trains natural Muon on the tasks of `benchmarks.muon_factors`, and prints how the
final validation loss changes compared with refreshes at steps 0, 1, 2, 4... and every 100 and four Newton-Schulz steps.
A variant is called by the first interval, the longest one, and the number of Newton-Schulz steps. The journal is used
as there. With ``--no-rises`` the learning rate begins at its highest value.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

import natgrad
from benchmarks import open_questions
from benchmarks.common import RESULTS
from benchmarks.muon_factors import TASKS, study

BASE = "1-100-4"
VARIANTS = ("1-25-4", "1-50-4", "1-200-4", "4-100-4", "8-100-4", "1-100-3", "4-100-3")


def train(name: str, variant: str, lr: float, seed: int, *, rises: bool) -> float:
    """Train once; return the final validation loss."""
    task, steps, heads = TASKS[name]
    first, most, products = map(int, variant.split("-"))

    def rule(step: int) -> float:
        return max(first, min(most, step / 2))

    refresh = natgrad.Refresh(factors=rule, inverses=rule, spread=8)
    build = open_questions.natural(head="adamw", heads=heads, refresh=refresh, steps=products)
    return open_questions.train(task, build, lr, steps, seed, rises=rises)["loss"]


def main(
    tasks: Annotated[str, typer.Option(help="Names, with commas.")] = ",".join(TASKS),
    variants: Annotated[str, typer.Option(help="With commas; compared with 1-100-4.")] = ",".join(VARIANTS),
    seeds: Annotated[int, typer.Option(help="How many to train, from 0.")] = 3,
    rises: Annotated[bool, typer.Option(help="Whether the learning rate rises in the first twentieth.")] = True,
    journal: Annotated[Path | None, typer.Option(help="Where runs are noted.")] = None,
) -> None:
    """Run what the journal lacks, and print the table of all that it has."""
    usual = RESULTS / ("muon_refresh.jsonl" if rises else "muon_refresh_no_rise.jsonl")
    study(tasks, variants, BASE, seeds, usual if journal is None else journal, partial(train, rises=rises))


if __name__ == "__main__":
    typer.run(main)
