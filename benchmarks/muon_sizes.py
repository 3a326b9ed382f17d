"""What natural Muon costs on networks of common sizes: its first steps on ResNet-18, its state on GPT-2 small.

``python -m benchmarks.muon_sizes`` trains ResNet-18 on random images of 224 pixels, and prints each step over the
median one; then the bytes of the optimizer's state over those of GPT-2 small's parameters.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

import natgrad
from benchmarks.common import conditions, save, timer

CPU = torch.device("cpu")


class Block(nn.Module):
    """A basic block of a residual network (He et al. 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        """Draw its convolutions."""
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = nn.Sequential()
        if before != after:
            self.shortcut.append(nn.Conv2d(before, after, 1, stride=stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, before, H, W] to [B, after, H / stride, W / stride]."""
        return functional.relu(self.shortcut(x) + self.inner(x))


def resnet18() -> nn.Module:
    """Return a network of torchvision's shapes."""
    network = nn.Sequential(nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    network.append(nn.MaxPool2d(3, stride=2, padding=1))
    for before, after in pairwise((64, 64, 64, 128, 128, 256, 256, 512, 512)):
        network.append(Block(before, after, 2 if after > before else 1))
    return network.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)])


class GPT2(nn.Module):
    """The layers of GPT-2 small, without a forward pass."""

    def __init__(self, width: int = 768, layers: int = 12) -> None:
        """Draw the layers."""
        super().__init__()
        self.tokens, self.places = nn.Embedding(50257, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            attention = [nn.Linear(width, 3 * width), nn.Linear(width, width)]
            perceptron = [nn.Linear(width, 4 * width), nn.Linear(4 * width, width)]
            self.blocks.append(nn.ModuleList([*attention, *perceptron, nn.LayerNorm(width), nn.LayerNorm(width)]))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 50257, bias=False)
        self.head.weight = self.tokens.weight


def first_steps(steps: int, batch: int) -> list[float]:
    """Return the seconds of processor time of the first training steps of ResNet-18."""
    torch.manual_seed(0)
    model, clock = resnet18(), timer("cpu", CPU)
    optimizer = natgrad.NaturalMuon(model)
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    seconds = []
    for _ in range(steps):
        start = clock()
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        seconds.append(clock() - start)
    return seconds


def state() -> float:
    """Return the bytes of natural Muon's state over those of the parameters of GPT-2 small."""
    model = GPT2()
    optimizer = natgrad.NaturalMuon(model)
    by_adamw = sum(parameter.nbytes for parameter in optimizer.param_groups[1]["params"])
    held = optimizer.preconditioner.plan.most_held + 2 * by_adamw
    return held / sum(parameter.nbytes for parameter in model.parameters())


def main(
    steps: Annotated[int, typer.Option(help="Of ResNet-18.")] = 60,
    batch: Annotated[int, typer.Option(help="Images.")] = 8,
) -> None:
    """Measure both, and save the result."""
    torch.set_num_threads(1)
    seconds = np.array(first_steps(steps, batch))
    shares = seconds / np.median(seconds)
    console = Console()
    console.print("ResNet-18, steps over the median one:", *(f"{share:.2f}" for share in shares))
    size = state()
    console.print(f"GPT-2 small, state over parameters: {size:.2f}")
    save("muon_sizes", {**conditions("cpu", CPU), "batch": batch, "steps": shares.tolist(), "state": size})


if __name__ == "__main__":
    typer.run(main)
