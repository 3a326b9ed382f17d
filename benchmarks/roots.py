"""Inverse roots of wide factors: eigendecompositions beside coupled Newton iterations, which need products alone.

    python -m benchmarks.roots [--side 1024 --side 2048] [--rounds 3]

The factor is that of 4,096 rows whose elements have standard deviations from 0 to 1, with natural Muon's damping. One
thread and its processor time; both are timed in turn, and given in products of two matrices of this side.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.common import CPU, conditions, interleave, median, save, timer
from natgrad.linalg import product
from natgrad.linalg.roots import inverse_root

ROWS, DAMPING = 4096, 1e-2
ROOTS = (2, 4)
TOLERANCE, MOST = 1e-5, 60  # of the iteration's residual, and of its steps


def factor(side: int) -> Tensor:
    """Return a factor [1, side, side] whose mean eigenvalue is 1."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, ROWS, side, generator=generator) * torch.linspace(0, 1, side).square()
    gram = product(rows.mT, rows)
    return gram / gram.diagonal(dim1=1, dim2=2).mean()


def coupled_newton(matrices: Tensor, root: int) -> tuple[Tensor, int]:
    """Return ``(X + δ I)^(-1/root)`` for roots 2 and 4, and the number of products (Guo & Higham 2006)."""
    unit = torch.eye(matrices.shape[-1], dtype=matrices.dtype)[None]
    damped = matrices + DAMPING * unit
    scale = (1 + root) / (2 * torch.linalg.matrix_norm(damped))
    M, X, products = damped * scale, unit * scale ** (1 / root), 0
    for _ in range(MOST):
        if (M - unit).abs().amax() < TOLERANCE:
            break
        T = ((root + 1) * unit - M) / root
        X, power = product(X, T), product(T, T)
        power = power if root == ROOTS[0] else product(power, power)
        M, products = product(power, M), products + (3 if root == ROOTS[0] else 4)
    return X, products


def laps(X: Tensor, root: int) -> dict[str, float]:
    """Return the seconds of a product, and of both ways to a root."""
    clock = timer("cpu", CPU)
    times = [clock()]
    for way in (
        lambda: product(X, X),
        lambda: inverse_root(X, DAMPING, 1 / root),
        lambda: coupled_newton(X, root),
    ):
        way()
        times.append(clock())
    lengths = [after - before for before, after in pairwise(times)]
    return dict(zip(("product", "eigendecomposition", "iteration"), lengths, strict=True))


def main(
    side: Annotated[list[int] | None, typer.Option(help="Of the factor; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(help="Of all in turn.")] = 3,
) -> None:
    """Time both, and save the table."""
    torch.set_num_threads(1)
    table = Table("side", "root", "eigendecomposition / product", "iteration / product", "products", "difference")
    rows = []
    for size in side or [1024, 2048]:
        X = factor(size)

        times = interleave({str(root): partial(laps, X, root) for root in ROOTS}, rounds=rounds, title=str(size))
        for root in ROOTS:
            found, products = coupled_newton(X, root)
            exact, _ = inverse_root(X, DAMPING, 1 / root)
            unit = times[f"{root}/product"]
            row = {
                "side": size,
                "root": root,
                "eigendecomposition": median(times[f"{root}/eigendecomposition"] / unit),
                "iteration": median(times[f"{root}/iteration"] / unit),
                "products": products,
                "difference": float((found - exact).norm() / exact.norm()),
            }
            rows.append(row)
            table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    save("roots", {**conditions("cpu"), "rounds": rounds, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
