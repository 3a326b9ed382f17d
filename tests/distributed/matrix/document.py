"""Runs the whole matrix and writes docs/compatibility.md: ``python -m tests.distributed.matrix.document``."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from rich.progress import track

from tests.distributed.harness import Ranks
from tests.distributed.matrix.cells import CELLS, RANKS, TOLERANCE, Cell
from tests.distributed.matrix.models import TASKS
from tests.distributed.matrix.test_matrix import PATH, measure

TEMPLATE = Path(__file__).parent / "template.md"


def main() -> None:
    """Run every cell and write the document."""
    torch.set_num_threads(1)
    ranks = Ranks()
    found = {cell: measure(ranks, cell) for cell in track(CELLS, "training every cell")}
    ranks.close()
    PATH.write_text(render(found))
    wrong = [str(cell) for cell, value in found.items() if value >= TOLERANCE[cell.precision]]
    print(f"{len(CELLS)} cells, {len(wrong)} beyond the tolerance", *wrong, sep="\n")


def render(found: dict[Cell, float]) -> str:
    """Return the document."""
    table = f"| wrapper | precision | {' | '.join(TASKS)} |\n|---|---|{'---:|' * len(TASKS)}\n"
    for wrapper, precision in itertools.product(RANKS, TOLERANCE):
        worst = [
            max(
                value
                for cell, value in found.items()
                if (cell.model, cell.wrapper, cell.precision) == (model, wrapper, precision)
            )
            for model in TASKS
        ]
        table += f"| {wrapper} | {precision} | {' | '.join(f'{value:.0e}' for value in worst)} |\n"
    fp32, bf16 = TOLERANCE.values()
    version = torch.__version__.split("+")[0]
    return TEMPLATE.read_text().format(torch=version, fp32=fp32, bf16=bf16, table=table)


if __name__ == "__main__":
    main()
