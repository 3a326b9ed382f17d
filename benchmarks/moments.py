"""EKFAC's second moments of one capture, against the bare matrix products that they take.

Run as `python -m benchmarks.moments`. The limit multiplies operands that lie ready, as many samples at a time as the
caches hold, in the order with the fewest multiply-adds; it neither makes patches nor squares nor sums. One thread, CPU
time; ratios are taken round by round, then their median.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.common import CLOCKS, conditions, interleave, median, peak_memory, save
from benchmarks.gram import release_memory
from natgrad.curvature.moments import add_moments_
from natgrad.curvature.sides import Full
from natgrad.layers import Rows, layers_for

ROUNDS = 15
AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer and the shape of its inputs."""

    title: str
    layer: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def rows(self) -> tuple[Rows, Rows]:
        """Return what the layer sees."""
        module = self.layer()
        layer, x = layers_for("", module)[0], torch.randn(self.shape)
        assert not isinstance(layer, str)
        return layer.rows(x, torch.randn_like(module(x)), len(x))


CASES = [
    Case(title="512 rows, 512 -> 512", layer=lambda: nn.Linear(512, 512), shape=(512, 512)),
    Case(title="256 rows, 1024 -> 256", layer=lambda: nn.Linear(1024, 256), shape=(256, 1024)),
    Case(title="64 rows, 784 -> 1000", layer=lambda: nn.Linear(784, 1000), shape=(64, 784)),
    Case(title="16 x 128 positions, 256 -> 256", layer=lambda: nn.Linear(256, 256), shape=(16, 128, 256)),
    Case(title="8 x 128 positions, 256 -> 1024", layer=lambda: nn.Linear(256, 1024), shape=(8, 128, 256)),
    Case(title="32 x 8 positions, 256 -> 256", layer=lambda: nn.Linear(256, 256), shape=(32, 8, 256)),
    Case(title="64 x 16 x 32², 3x3 -> 16", layer=lambda: nn.Conv2d(16, 16, 3, padding=1), shape=(64, 16, 32, 32)),
    Case(title="64 x 32 x 16², 3x3 -> 32", layer=lambda: nn.Conv2d(32, 32, 3, padding=1), shape=(64, 32, 16, 16)),
    Case(title="64 x 64 x 8², 3x3 -> 64", layer=lambda: nn.Conv2d(64, 64, 3, padding=1), shape=(64, 64, 8, 8)),
    Case(title="8 x 64 x 56², 3x3 -> 64", layer=lambda: nn.Conv2d(64, 64, 3, padding=1), shape=(8, 64, 56, 56)),
    Case(title="8 x 256 x 14², 3x3 -> 256", layer=lambda: nn.Conv2d(256, 256, 3, padding=1), shape=(8, 256, 14, 14)),
    Case(title="8 x 256 x 14², 1x1 -> 256", layer=lambda: nn.Conv2d(256, 256, 1), shape=(8, 256, 14, 14)),
    Case(
        title="16 x 32 x 28², 3x3, depthwise",
        layer=lambda: nn.Conv2d(32, 32, 3, padding=1, groups=32),
        shape=(16, 32, 28, 28),
    ),
]


def methods(case: Case) -> dict[str, Callable[[], object]]:
    """Return the limit, and what natgrad does."""
    inputs, gradients = case.rows()
    a, g = (rows.dense().contiguous() for rows in (inputs, gradients))  # [n, B, T, d]
    (n, B, T, i), o = a.shape, g.shape[-1]
    held = {"QA": torch.linalg.qr(torch.randn(n, i, i))[0], "QG": torch.linalg.qr(torch.randn(n, o, o))[0]}
    S = torch.zeros(n, o, i)

    def limit() -> None:
        step = B if T == 1 else max(1, AT_ONCE // (n * (T * (o + i) + o * i)))
        for start in range(0, B, step):
            some = slice(start, start + step)
            left, right = g[:, some], a[:, some]
            if i >= T:
                left = (left.flatten(1, 2) @ held["QG"]).view(left.shape)
            if o >= T:
                right = (right.flatten(1, 2) @ held["QA"]).view(right.shape)
            if T == 1:
                torch.bmm(left[:, :, 0].mT, right[:, :, 0])
                continue
            product = left.mT @ right
            if o < T:
                product = (product.flatten(1, 2) @ held["QA"]).view(product.shape)
            if i < T:
                turned = product.view(n, -1, o)  # its memory, in another order: nothing is copied
                torch.matmul(turned, held["QG"])

    def natgrad() -> None:
        add_moments_(S, inputs, gradients, Full(), Full(), held, scale=1.0)

    return {"limit": limit, "natgrad": natgrad}


def measure(case: Case) -> dict[str, Any]:
    """Time a case, and weigh the memory that each way adds at its peak."""
    ways, clock = methods(case), CLOCKS["cpu"]

    def timed(run: Callable[[], object]) -> Callable[[], dict[str, float]]:
        def subject() -> dict[str, float]:
            start = clock()
            run()
            return {"run": clock() - start}

        return subject

    times = interleave({name: timed(run) for name, run in ways.items()}, rounds=ROUNDS, title=case.title)
    release_memory()
    before, peak = peak_memory(lambda: None), peak_memory(ways["natgrad"])
    return {
        "case": case.title,
        "milliseconds": 1e3 * median(times["natgrad/run"]),
        "ratio": float(np.median(times["natgrad/run"] / times["limit/run"])),
        "mebibytes": (peak - before) / 2**20,
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        results = [measure(case) for case in CASES]
    shown = Table("case", "natgrad [ms]", "over the limit", "MiB")
    for result in results:
        numbers = f"{result['milliseconds']:.2f}", f"{result['ratio']:.2f}", f"{result['mebibytes']:.1f}"
        shown.add_row(result["case"], *numbers)
    console = Console()
    console.print(shown)
    path = save("moments", {**conditions("cpu"), "rounds": ROUNDS, "results": results})
    console.print(f"Written to {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    main()
