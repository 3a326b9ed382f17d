"""What memory a preconditioner adds to SGD's: at its peak and between steps.

    python -m benchmarks.memory [--workload resnet32|encoder] [--runs 9] [--device cpu|cuda]

Each figure is the greatest resident memory of a fresh process over two cycles of three steps (all renewed, factors
renewed, nothing renewed) minus that over SGD's steps alone. *Resident* is with the system's allocator as it is, whose
holes move the figure by some MiB from run to run: the median of several processes. *Live* is with an allocator that
gives every tensor back when it is freed (glibc's ``MALLOC_MMAP_THRESHOLD_``): what the method needs but for holes.
*Kept* is what stays between steps.

On a GPU torch's own allocator counts, the same in every run: *resident* is what it has reserved, *live* what of that
is allocated; the latter is compared.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Annotated, Literal, get_args

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.common import (
    Device,
    chosen_device,
    conditions,
    launch,
    median,
    peak_memory,
    resident_memory,
    save,
)
from benchmarks.models import WORKLOADS, Name
from benchmarks.peers import FORMS, KFAC_PYTORCH, Form, Trainer, methods

RUNS: dict[Device, int] = {"cpu": 9, "cuda": 1}
PEERS = ("natgrad", "kfac-pytorch") if KFAC_PYTORCH else ("natgrad",)
Allocator = Literal["resident", "live"]
COMPARED: dict[Device, Allocator] = {"cpu": "resident", "cuda": "live"}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """MiB that a method adds to SGD.

    Attributes:
        method: Whose.
        form: Of its curvature.
        resident: At the peak, as the system counts it, or on a GPU reserved by torch.
        live: At the peak, without holes of freed memory.
        kept: Between steps, without such holes.
    """

    method: str
    form: Form
    resident: float
    live: float
    kept: float


def measure(workload: Name, method: str, kind: Allocator, device: torch.device) -> tuple[float, float]:
    """Return the MiB that a method adds at its peak and between steps; to be called in a fresh process."""
    torch.set_num_threads(1)
    trainer = Trainer(WORKLOADS[workload], device=device)
    trainer.cycle()
    peak_alone, kept_alone = peak_on(device, kind, trainer.cycle), settled_memory(trainer)
    trainer.preconditioner = methods()[method](trainer)
    peak = peak_on(device, kind, lambda: (trainer.cycle(), trainer.cycle()))
    return (peak - peak_alone) / 2**20, (settled_memory(trainer) - kept_alone) / 2**20


def peak_on(device: torch.device, kind: Allocator, run: Callable[[], object]) -> int:
    """Return the greatest memory of a device in bytes while `run` runs.

    Args:
        device: Which; the CPU's memory is the resident one, whatever the kind.
        kind: Whether what torch has reserved of a GPU counts ("resident"), or what is allocated ("live").
        run: What may need it.
    """
    if device.type == "cpu":
        return peak_memory(run)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_reserved(device) if kind == "resident" else torch.cuda.max_memory_allocated(device)


def settled_memory(trainer: Trainer) -> int:
    """Return the resident memory between steps, or a GPU's allocated one, gradients dropped."""
    trainer.optimizer.zero_grad()
    gc.collect()
    return resident_memory() if trainer.device.type == "cpu" else torch.cuda.memory_allocated(trainer.device)


@contextmanager
def allocator(kind: Allocator, device: torch.device) -> Iterator[None]:
    """Have processes started meanwhile use an allocator of that kind; that of a GPU counts both."""
    name = "MALLOC_MMAP_THRESHOLD_"
    if kind == "live" and device.type == "cpu":
        os.environ[name] = str(2**16)
    try:
        yield
    finally:
        os.environ.pop(name, None)


def fresh(device: torch.device, workload: Name, method: str, kind: Allocator, runs: int) -> tuple[float, float]:
    """Return the medians of `measure` over fresh processes."""
    with allocator(kind, device):
        values = [launch(1, measure, workload, method, kind, device) for _ in range(runs)]
    peaks, kept = zip(*values, strict=True)
    return median(np.array(peaks)), median(np.array(kept))


def compare(workload: Name, runs: int, device: torch.device) -> list[Memory]:
    """Measure every method on a workload."""
    rows = []
    for form, peer in product(FORMS, PEERS):
        added = partial(fresh, device, workload, f"{peer} {form}")
        resident, _ = added("resident", runs)
        live, kept = added("live", 1)
        rows.append(Memory(method=peer, form=form, resident=resident, live=live, kept=kept))
    return rows


def show(title: str, rows: list[Memory], compared: Allocator) -> Table:
    """Return the table of a workload, with natgrad's shares of kfac-pytorch's figures of one kind."""
    table = Table(
        *("form", "method", "resident MiB", "live MiB", "kept MiB"),
        f"{compared} / kfac-pytorch's",
        title=f"{title}: memory added to SGD's",
    )
    peers = {row.form: row for row in rows if row.method != "natgrad"}
    for row in rows:
        peer = peers.get(row.form)
        share = ""
        if row.method == "natgrad" and peer:
            share = f"{getattr(row, compared) / getattr(peer, compared):.2f}"
        figures = (f"{value:.0f}" for value in (row.resident, row.live, row.kept))
        table.add_row(row.form, row.method, *figures, share)
    return table


def main(
    workload: Annotated[Name | None, typer.Option(help="The one to run; both unless given.")] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Processes a figure; unless given 9, on a GPU 1.")] = None,
    device: Annotated[Device, typer.Option(help="Whose memory is measured.")] = "cpu",
) -> None:
    """Measure, print the tables, and write benchmarks/results/memory.json, or memory_cuda.json."""
    results, place, runs = {}, chosen_device(device), runs or RUNS[device]
    for name in get_args(Name):
        if workload in (None, name):
            results[name] = compare(name, runs, place)
            Console(width=120).print(show(WORKLOADS[name].title, results[name], COMPARED[device]))
    rows = {name: [asdict(row) for row in result] for name, result in results.items()}
    settings = {"runs": runs, "kfac-pytorch": KFAC_PYTORCH or "not installed"}
    path = save("memory" if device == "cpu" else "memory_cuda", conditions(device=place) | settings | rows)
    typer.echo(f"Written to {path}")


if __name__ == "__main__":
    typer.run(main)
