"""The Gram products of K-FAC's factors, method by method, against the obvious way: copy all rows, multiply once.

Run as `python -m benchmarks.gram`. One thread, CPU time; ratios are taken round by round, then their median.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import CLOCKS, conditions, interleave, median, peak_memory, save
from natgrad.layers import gram
from natgrad.layers.gram.lags import add_lag_gram_
from natgrad.layers.gram.rows import add_column_grams_
from natgrad.layers.gram.windows import Window

ROUNDS = 15
PIECE = 1 << 18
Methods = dict[str, Callable[[], object]]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a linear layer."""

    rows: int
    width: int
    bias: bool = True

    def __str__(self) -> str:
        """Return what the table shows."""
        return f"rows {self.rows} x {self.width}{', bias' * self.bias}"

    def methods(self) -> Methods:
        """Return ways to their Gram product."""
        rows, size = torch.randn(self.rows, self.width), self.width + self.bias
        out, array = torch.zeros(size, size), rows.numpy()

        def obvious() -> Tensor:
            full = torch.cat((rows, rows.new_ones(self.rows, 1)), 1) if self.bias else rows
            return out.add_(full.T @ full)

        return {
            "obvious": obvious,
            "numpy, no bias": lambda: array.T @ array,
            "natgrad": lambda: gram.add_row_gram_(out, rows, bias=self.bias),
        }


@dataclass(frozen=True, kw_only=True)
class Channels:
    """Output gradients of a convolution."""

    batch: int
    channels: int
    size: int
    channels_last: bool = False

    def __str__(self) -> str:
        """Return what the table shows."""
        return f"channels {self.batch} x {self.channels} x {self.size}²{', channels last' * self.channels_last}"

    def methods(self) -> Methods:
        """Return ways to their Gram product."""
        maps, out = torch.randn(self.batch, self.channels, self.size, self.size), torch.zeros(1, *[self.channels] * 2)
        maps = maps.contiguous(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)

        def obvious() -> Tensor:
            rows = maps.permute(0, 2, 3, 1).reshape(-1, self.channels)
            return out.add_(rows.T @ rows)

        return {"obvious": obvious, "natgrad": lambda: gram.add_channel_gram_(out, maps)}


@dataclass(frozen=True, kw_only=True)
class Patches:
    """Input of a 2-dimensional convolution with half-kernel padding."""

    batch: int
    channels: int
    size: int
    kernel: int = 3
    stride: int = 1
    groups: int = 1
    bias: bool = False

    def __str__(self) -> str:
        """Return what the table shows."""
        kernel = f"kernel {self.kernel}" + f", stride {self.stride}" * (self.stride > 1)
        groups = f", groups {self.groups}" * (self.groups > 1)
        return f"patches {self.batch} x {self.channels} x {self.size}², {kernel}{groups}{', bias' * self.bias}"

    def methods(self) -> Methods:
        """Return ways to their patch covariance."""
        maps = torch.randn(self.batch, self.channels, self.size, self.size)
        padding = self.kernel // 2
        window = Window(
            kernel_size=(self.kernel,) * 2,
            stride=(self.stride,) * 2,
            padding=((padding,) * 2,) * 2,
            dilation=(1, 1),
        )
        width = self.channels // self.groups * self.kernel**2
        out = torch.zeros(self.groups, *[width + self.bias] * 2)
        square = out[:, :width, :width]

        def obvious() -> Tensor:
            patches = F.unfold(maps, self.kernel, padding=padding, stride=self.stride)
            rows = patches.unflatten(1, (self.groups, width)).permute(1, 0, 3, 2).reshape(self.groups, -1, width)
            rows = torch.cat((rows, rows.new_ones(*rows.shape[:2], 1)), 2) if self.bias else rows
            return out.add_(rows.mT @ rows)

        methods: Methods = {
            "obvious": obvious,
            "patches": lambda: add_column_grams_(square, window.columns(maps, self.groups, PIECE)),
        }
        if self.stride == 1:
            methods["lags"] = lambda: add_lag_gram_(square, maps, window, self.groups, scale=1.0, piece=PIECE)
        methods["natgrad"] = lambda: gram.add_patch_gram_(out, maps, window, bias=self.bias)
        return methods


CASES: list[Rows | Channels | Patches] = [
    *(Rows(rows=rows, width=width) for rows, width in ((1024, 256), (1024, 1024), (256, 512), (500, 64), (500, 256))),
    *(Channels(batch=64, channels=channels, size=size) for channels, size in ((16, 32), (32, 16), (64, 8))),
    Channels(batch=64, channels=16, size=32, channels_last=True),
    Channels(batch=4, channels=512, size=28),
    *(Patches(batch=64, channels=channels, size=size) for channels, size in ((3, 32), (16, 32), (32, 16), (64, 8))),
    *(Patches(batch=64, channels=channels, size=size, stride=2) for channels, size in ((16, 32), (32, 16))),
    *(Patches(batch=64, channels=channels, size=size, stride=2, kernel=1) for channels, size in ((16, 32), (32, 16))),
    Patches(batch=64, channels=16, size=32, bias=True),
    *(Patches(batch=4, channels=channels, size=size) for channels, size in ((64, 56), (128, 28), (256, 14), (512, 7))),
    *(Patches(batch=4, channels=channels, size=size, stride=2) for channels, size in ((128, 56), (256, 28))),
    Patches(batch=4, channels=3, size=224, kernel=7, stride=2),
    Patches(batch=64, channels=1, size=28, kernel=5, bias=True),
    Patches(batch=64, channels=6, size=14, kernel=5, bias=True),
    Patches(batch=16, channels=64, size=28, groups=4),
    Patches(batch=16, channels=32, size=28, groups=32),
]


def measure(case: Rows | Channels | Patches) -> dict[str, Any]:
    """Time a case's methods and weigh the memory that each adds at its peak."""
    methods, clock = case.methods(), CLOCKS["cpu"]

    def timed(run: Callable[[], object]) -> Callable[[], dict[str, float]]:
        def subject() -> dict[str, float]:
            start = clock()
            run()
            return {"run": clock() - start}

        return subject

    times = interleave({name: timed(run) for name, run in methods.items()}, rounds=ROUNDS, title=str(case))
    results = {}
    for name, run in methods.items():
        release_memory()
        before, peak = peak_memory(lambda: None), peak_memory(run)
        results[name] = {
            "milliseconds": 1e3 * median(times[f"{name}/run"]),
            "ratio": float(np.median(times[f"{name}/run"] / times["obvious/run"])),
            "mebibytes": None if before is None or peak is None else (peak - before) / 2**20,
        }
    return {"case": str(case), "methods": results}


def release_memory() -> None:
    """Give freed memory back to the system, where the C library can, so that the next peak shows what is allocated."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def table(results: list[dict[str, Any]]) -> Table:
    """Show the results, the obvious way in milliseconds and MiB and the others as its multiples."""
    names = list(dict.fromkeys(name for result in results for name in result["methods"]))
    shown = Table("case", *(f"{name} [ms]" if name == "obvious" else name for name in names), "MiB", "obvious MiB")
    for result in results:
        methods = result["methods"]
        cells = []
        for name in names:
            key = "milliseconds" if name == "obvious" else "ratio"
            cells.append(f"{methods[name][key]:.2f}" if name in methods else "")
        memory = (methods[name]["mebibytes"] for name in ("natgrad", "obvious"))
        shown.add_row(result["case"], *cells, *("" if value is None else f"{value:.1f}" for value in memory))
    return shown


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        results = [measure(case) for case in CASES]
    console = Console()
    console.print(table(results))
    path = save("gram", {**conditions("cpu"), "rounds": ROUNDS, "results": results})
    console.print(f"Written to {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    main()
