"""Time what layers save that read the same tensor: queries, keys and values, and the two layers of a gated perceptron.

``python -m benchmarks.shared_inputs`` trains a small decoder, and the same one whose layers read views, which are
other tensors of equal values. Steps with a refresh and others are timed apart, interleaved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import natgrad
from benchmarks.common import CPU, Clock, conditions, interleave, median, save, timer

POSITIONS = 128


class Block(nn.Module):
    """Attention with separate projections, and a gated perceptron; without biases."""

    def __init__(self, width: int, hidden: int, *, shares: bool) -> None:
        """Make the layers. `shares`: whether layers read the same tensor; otherwise each reads a view of its own."""
        super().__init__()
        self.shares, self.heads = shares, width // 64
        self.attention_norm, self.hidden_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map `[batch, positions, width]` to the same shape."""
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.read(self.attention_norm(tokens), self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.output(attended.transpose(1, 2).flatten(-2))
        gate, up = self.read(self.hidden_norm(tokens), self.gate, self.up)
        tokens = tokens + self.down(functional.silu(gate) * up)
        return tokens

    def read(self, tokens: Tensor, *layers: nn.Module) -> list[Tensor]:
        """Apply layers that read the same tokens."""
        return [layer(tokens if self.shares else tokens.view_as(tokens)) for layer in layers]


def decoder(width: int, hidden: int, layers: int, *, shares: bool) -> nn.Module:
    """Return a decoder of bytes."""
    torch.manual_seed(0)
    blocks = [Block(width, hidden, shares=shares) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(256, width), *blocks, nn.RMSNorm(width), nn.Linear(width, 256, bias=False))


def natural_muon(model: nn.Module) -> natgrad.PreconditionedOptimizer:
    """Return natural Muon, which refreshes in every second step."""
    return natgrad.NaturalMuon(model, lr=1e-3, refresh=natgrad.Refresh(factors=2, inverses=2))


def kfac(model: nn.Module) -> natgrad.PreconditionedOptimizer:
    """Return K-FAC of all layers but the embedding, which refreshes in every second step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    preconditioner = natgrad.Preconditioner(
        model,
        {"0": None, "*": natgrad.KFAC()},
        optimizer=optimizer,
        reduction="mean",
        refresh=natgrad.Refresh(factors=2, inverses=2),
    )
    return natgrad.PreconditionedOptimizer(optimizer, preconditioner)


METHODS: dict[str, Callable[[nn.Module], natgrad.PreconditionedOptimizer]] = {
    "NaturalMuon": natural_muon,
    "KFAC": kfac,
}


class Trainer:
    """A training loop of one method."""

    def __init__(self, model: nn.Module, method: str, batch: Tensor, clock: Clock) -> None:
        """Build the optimizer."""
        self.model, self.batch, self.clock = model, batch, timer(clock, CPU)
        self.optimizer = METHODS[method](model)

    def cycle(self) -> dict[str, float]:
        """Run two steps; return the seconds of the first, which refreshes, and how many more they are."""
        laps = []
        for _ in range(2):
            start = self.clock()
            self.optimizer.zero_grad()
            logits = self.model(self.batch[:, :-1]).flatten(0, 1)
            torch.autograd.backward(functional.cross_entropy(logits, self.batch[:, 1:].flatten()))
            self.optimizer.step()
            laps.append(self.clock() - start)
        return {"refresh": laps[0], "beyond": laps[0] - laps[1]}


def main(
    width: Annotated[int, typer.Option(help="Of the decoder.")] = 256,
    hidden: Annotated[int, typer.Option(help="Width of the gated perceptrons.")] = 688,
    layers: Annotated[int, typer.Option(help="Of the decoder.")] = 2,
    tokens: Annotated[int, typer.Option(help="In a batch.")] = 4096,
    rounds: Annotated[int, typer.Option(help="Cycles of each method, interleaved.")] = 15,
    clock: Annotated[str, typer.Option(help="'wall' or 'cpu'.")] = "cpu",
) -> None:
    """Time all methods in turn, and save the table."""
    torch.set_num_threads(1)
    chosen: Clock = "cpu" if clock == "cpu" else "wall"
    batch = torch.randint(256, (tokens // POSITIONS, POSITIONS + 1), generator=torch.Generator().manual_seed(1))
    trainers = {
        f"{method}/{shares}": Trainer(decoder(width, hidden, layers, shares=shares), method, batch, chosen)
        for method in METHODS
        for shares in (True, False)
    }
    title = f"{layers}-layer decoder, widths {width} and {hidden}, {tokens} tokens"
    times = interleave({name: one.cycle for name, one in trainers.items()}, rounds=rounds, title=title)
    table, rows = Table("shared / apart", "capture and refresh", "a step with both"), {}
    for method in METHODS:
        shared, apart = (
            {lap: times[f"{method}/{flag}/{lap}"] for lap in ("refresh", "beyond")} for flag in (True, False)
        )
        rows[method] = {
            "capture and refresh": median(shared["beyond"]) / median(apart["beyond"]),
            "a step with both": median(shared["refresh"] / apart["refresh"]),
        }
        table.add_row(method, *(f"{value:.3f}" for value in rows[method].values()))
    Console().print(title)
    Console().print(table)
    save("shared_inputs", {**conditions(chosen), "title": title, "rounds": rounds, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
