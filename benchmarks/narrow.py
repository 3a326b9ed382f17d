"""From which size on a CPU multiplies natural Muon's matrices faster in bfloat16 than in float32.

``python -m benchmarks.narrow`` times four Newton-Schulz steps between two products with a root, on one thread, for
stacks of one and four matrices, and prints the ratios. Conversions to bfloat16 and back are included.
"""

from __future__ import annotations

from statistics import median
from time import process_time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.common import conditions
from natgrad.linalg.roots import newton_schulz

SIZES = (32, 64, 96, 128, 160, 192, 256, 384, 512)
RATIOS = (1, 4)  # of the sides of a matrix
STACKS = (1, 4)  # matrices at once
ROUNDS, WORK = 7, 2e8  # multiply-adds of a round, about


def update(matrices: Tensor, root: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of a root, a polar factor and the root, computed in `dtype`."""
    narrow = root.to(dtype)
    return torch.bmm(narrow, newton_schulz(torch.bmm(narrow, matrices.to(dtype)), 4)).float()


def seconds(matrices: Tensor, root: Tensor, dtype: torch.dtype) -> float:
    """Return the processor time of an update, the median of some rounds."""
    repeats = int(min(200, max(2, WORK / (16 * matrices.numel() * matrices.shape[1]))))
    found = []
    update(matrices, root, dtype)
    for _ in range(ROUNDS):
        begun = process_time()
        for _ in range(repeats):
            update(matrices, root, dtype)
        found.append((process_time() - begun) / repeats)
    return median(found)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    heads = [f"{count} x [d, {ratio if ratio > 1 else ''}d]" for count in STACKS for ratio in RATIOS]
    table = Table("d", *heads, title="time in bfloat16, compared with float32")
    for size in SIZES:
        cells = []
        for count in STACKS:
            for ratio in RATIOS:
                matrices, root = torch.randn(count, size, ratio * size), torch.randn(count, size, size)
                narrow, wide = (seconds(matrices, root, dtype) for dtype in (torch.bfloat16, torch.float32))
                cells.append(f"{narrow / wide:.2f}")
        table.add_row(str(size), *cells)
    console = Console()
    console.print(table)
    console.print(conditions()["machine"])


if __name__ == "__main__":
    main()
