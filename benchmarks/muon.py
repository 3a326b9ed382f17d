"""Time `natgrad.NaturalMuon` beside torch's Muon and a lean one in float32: whole training steps of one process.

``python -m benchmarks.muon`` times a transformer encoder with each method at its defaults, a step of each in turn, over
whole cycles of natural Muon's interval. "longest" is the longest step of a cycle over the median one; "state" the bytes
of the optimizer's state over those of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import natgrad
from benchmarks.common import Clock, conditions, interleave, median, save, timer
from benchmarks.models import Encoder, Workload
from benchmarks.scoreboard.baselines import LeanMuon, split

POSITIONS = 128
INTERVAL = 25


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


def natural(dtype: torch.dtype | Literal["auto"] | None = "auto") -> Callable[[nn.Module], Optimizer]:
    """Return natural Muon, which refreshes in the first step of each cycle, with products in `dtype`."""
    rule = natgrad.Refresh(factors=INTERVAL, inverses=INTERVAL, spread=8)
    return lambda model: natgrad.NaturalMuon(model, lr=1e-3, dtype=dtype, refresh=rule)


METHODS: dict[str, Callable[[nn.Module], Pair | Optimizer]] = {
    "AdamW": lambda model: AdamW(model.parameters(), lr=1e-3),
    "torch.optim.Muon": torch_muon,
    "Muon, float32": lean_muon,
    "NaturalMuon": natural(),
    "NaturalMuon, float32": natural(None),
}


class Trainer:
    """A training loop of one method."""

    def __init__(self, workload: Workload, method: str, clock: Clock, device: torch.device) -> None:
        """Build the model and the optimizer."""
        self.workload, self.clock = workload, timer(clock, device)
        self.model = workload.model().to(device)
        self.inputs, self.labels = (each.to(device) for each in workload.data())
        self.optimizer = METHODS[method](self.model)

    def step(self) -> dict[str, float]:
        """Take a training step; return its seconds."""
        start = self.clock()
        self.model.zero_grad()
        torch.autograd.backward(self.workload.loss(self.model(self.inputs), self.labels))
        self.optimizer.step()
        return {"step": self.clock() - start}

    def state(self) -> float:
        """Return the bytes of the optimizer's state over those of the parameters."""
        optimizers = self.optimizer.optimizers if isinstance(self.optimizer, Pair) else (self.optimizer,)
        held = sum(
            value.nbytes
            for one in optimizers
            for state in one.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )
        if isinstance(self.optimizer, natgrad.NaturalMuon):
            held += self.optimizer.preconditioner.plan.most_held
        return held / sum(parameter.nbytes for parameter in self.model.parameters())


def main(
    width: Annotated[int, typer.Option(help="Of the encoder.")] = 256,
    layers: Annotated[int, typer.Option(help="Of the encoder.")] = 4,
    tokens: Annotated[int, typer.Option(help="In a batch.")] = 4096,
    cycles: Annotated[int, typer.Option(help=f"Of {INTERVAL} steps, after a first one.")] = 2,
    clock: Annotated[str, typer.Option(help="'wall' or 'cpu'.")] = "cpu",
    device: Annotated[str, typer.Option(help="Where to train.")] = "cpu",
) -> None:
    """Time all methods in turn, and save the table."""
    torch.set_num_threads(1)
    where, workload = torch.device(device), encoder(width, layers, tokens)
    chosen: Clock = "cpu" if clock == "cpu" else "wall"
    trainers = {name: Trainer(workload, name, chosen, where) for name in METHODS}
    for trainer in trainers.values():
        trainer.step()  # the first one compares ranks and allocates
    for trainer in trainers.values():
        for _ in range(INTERVAL - 1):
            if isinstance(trainer.optimizer, natgrad.NaturalMuon):
                trainer.step()
    subjects = {name: one.step for name, one in trainers.items()}
    times = interleave(subjects, rounds=cycles * INTERVAL, title=workload.title, warm=True)
    by_cycle = {name: times[f"{name}/step"].reshape(cycles, INTERVAL) for name in METHODS}
    whole = {name: found.mean(1) for name, found in by_cycle.items()}
    table = Table("method", "step / AdamW's", "step / torch's Muon", "step / Muon's, float32", "longest", "state")
    rows = {}
    for name in METHODS:
        typical = np.median(by_cycle[name], 0)  # of each step of a cycle
        rows[name] = {
            "AdamW": median(whole[name] / whole["AdamW"]),
            "torch.optim.Muon": median(whole[name] / whole["torch.optim.Muon"]),
            "Muon, float32": median(whole[name] / whole["Muon, float32"]),
            "longest": float(typical.max() / np.median(typical)),
            "state": trainers[name].state(),
        }
        table.add_row(name, *(f"{value:.3f}" for value in rows[name].values()))
    Console().print(workload.title)
    Console().print(table)
    result = {**conditions(chosen, where), "title": workload.title, "cycles": cycles, "rows": rows}
    suffix = "" if where.type == "cpu" else f"_{where.type}"
    save(f"muon_{width}{suffix}", result)


if __name__ == "__main__":
    typer.run(main)
