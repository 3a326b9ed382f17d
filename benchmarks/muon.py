"""Time `natgrad.NaturalMuon` beside torch's Muon and a lean one in float32: whole training steps of one process.

``python -m benchmarks.muon`` times a transformer encoder. Steps between refreshes and those of a refresh are timed
apart, interleaved; the ratio is that of a cycle of ``--interval`` steps, one of which refreshes. Capture is what the
forward and backward pass of a refresh take more than those of other steps, as a share of the cycle.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import AdamW, Optimizer

import natgrad
from benchmarks.common import Clock, conditions, interleave, median, save, timer
from benchmarks.models import Encoder, Workload
from benchmarks.scoreboard.baselines import LeanMuon, split

POSITIONS = 128
CYCLE = 3  # steps that are timed, of which the first refreshes


def encoder(width: int, layers: int, tokens: int) -> Workload:
    """Return an encoder of four times as wide perceptrons, and a batch of so many bytes."""
    batch = tokens // POSITIONS
    return Workload(
        title=f"{layers}-layer transformer encoder, width {width}, {tokens} tokens",
        architecture=lambda: Encoder(
            layers=layers, width=width, hidden=4 * width, heads=width // 64, positions=POSITIONS
        ),
        batch=lambda: (torch.randint(256, (batch, POSITIONS)), torch.randint(256, (batch, POSITIONS))),
        reduction="tokens",
    )


class Pair:
    """Muon of the hidden matrices and AdamW of the other parameters."""

    def __init__(self, muon: Optimizer, rest: Optimizer) -> None:
        """Step both."""
        self.optimizers = (muon, rest)

    def step(self) -> None:
        """Step both."""
        for optimizer in self.optimizers:
            optimizer.step()


def torch_muon(model: nn.Module) -> Pair:
    """Return ``torch.optim.Muon`` with AdamW."""
    matrices, rest = split(model)
    muon = torch.optim.Muon(matrices, lr=1e-3, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    return Pair(muon, AdamW(rest, lr=1e-3))


def lean_muon(model: nn.Module) -> Pair:
    """Return a Muon in float32 that does no more than it must, with AdamW."""
    matrices, rest = split(model)
    return Pair(LeanMuon(matrices, lr=1e-3, momentum=0.9), AdamW(rest, lr=1e-3))


def natural(dtype: torch.dtype | None) -> Callable[[nn.Module], Optimizer]:
    """Return natural Muon with products in `dtype`, which refreshes in the first step of each cycle."""
    return lambda model: natgrad.NaturalMuon(
        model, lr=1e-3, dtype=dtype, refresh=natgrad.Refresh(factors=CYCLE, inverses=CYCLE)
    )


METHODS: dict[str, Callable[[nn.Module], Pair | Optimizer]] = {
    "AdamW": lambda model: AdamW(model.parameters(), lr=1e-3),
    "torch.optim.Muon": torch_muon,
    "Muon, float32": lean_muon,
    "NaturalMuon": natural(None),
    "NaturalMuon, bfloat16": natural(torch.bfloat16),
}


class Trainer:
    """A training loop of one method."""

    def __init__(self, workload: Workload, method: str, clock: Clock, device: torch.device) -> None:
        """Build the model and the optimizer."""
        self.workload, self.clock = workload, timer(clock, device)
        self.model = workload.model().to(device)
        self.inputs, self.labels = (each.to(device) for each in workload.data())
        self.optimizer = METHODS[method](self.model)

    def cycle(self) -> dict[str, float]:
        """Run one cycle; return the seconds of its refresh, the mean of its other steps, and those of their passes."""
        passes, steps = [], []
        for _ in range(CYCLE):
            start = self.clock()
            self.model.zero_grad()
            torch.autograd.backward(self.workload.loss(self.model(self.inputs), self.labels))
            passes.append(self.clock() - start)
            self.optimizer.step()
            steps.append(self.clock() - start)
        return {
            "refresh": steps[0],
            "plain": sum(steps[1:]) / (CYCLE - 1),
            "capture": passes[0] - sum(passes[1:]) / (CYCLE - 1),
        }


def main(
    width: Annotated[int, typer.Option(help="Of the encoder.")] = 256,
    layers: Annotated[int, typer.Option(help="Of the encoder.")] = 4,
    tokens: Annotated[int, typer.Option(help="In a batch.")] = 4096,
    interval: Annotated[int, typer.Option(help="Steps between two refreshes.")] = 25,
    rounds: Annotated[int, typer.Option(help="Cycles of each method, interleaved.")] = 5,
    clock: Annotated[str, typer.Option(help="'wall' or 'cpu'.")] = "cpu",
    device: Annotated[str, typer.Option(help="Where to train.")] = "cpu",
) -> None:
    """Time all methods in turn, and save the table."""
    torch.set_num_threads(1)
    where, workload = torch.device(device), encoder(width, layers, tokens)
    chosen: Clock = "cpu" if clock == "cpu" else "wall"
    trainers = {name: Trainer(workload, name, chosen, where) for name in METHODS}
    times = interleave({name: one.cycle for name, one in trainers.items()}, rounds=rounds, title=workload.title)
    whole = {name: (times[f"{name}/refresh"] + (interval - 1) * times[f"{name}/plain"]) / interval for name in METHODS}
    columns = "step / AdamW's", "step / torch's Muon", "step / Muon's, float32", "refresh / plain", "capture"
    table = Table("method", *columns)
    rows = {}
    for name in METHODS:
        rows[name] = {
            "AdamW": median(whole[name] / whole["AdamW"]),
            "torch.optim.Muon": median(whole[name] / whole["torch.optim.Muon"]),
            "Muon, float32": median(whole[name] / whole["Muon, float32"]),
            "refresh over plain": median(times[f"{name}/refresh"] / times[f"{name}/plain"]),
            "share of capture": median(times[f"{name}/capture"] / (interval * whole[name])),
        }
        table.add_row(name, *(f"{value:.3f}" for value in rows[name].values()))
    Console().print(workload.title)
    Console().print(table)
    result = {
        **conditions(chosen, where),
        "title": workload.title,
        "interval": interval,
        "rounds": rounds,
        "rows": rows,
    }
    suffix = "" if where.type == "cpu" else f"_{where.type}"
    save(f"muon_{width}{suffix}", json.loads(json.dumps(result)))


if __name__ == "__main__":
    typer.run(main)
