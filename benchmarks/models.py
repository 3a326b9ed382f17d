"""The workloads that the benchmarks run: a CIFAR ResNet-32 and a transformer encoder, each with one fixed batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from natgrad.tasks.resnet import ResNet

Name = Literal["resnet32", "encoder"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, one batch for it, and how its loss averages."""

    title: str
    architecture: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    reduction: Literal["mean", "tokens"]

    def model(self) -> nn.Module:
        """Return the model, with the same weights at each call."""
        torch.manual_seed(0)
        return self.architecture()

    def data(self) -> tuple[Tensor, Tensor]:
        """Return inputs and labels, the same at each call."""
        torch.manual_seed(1)
        return self.batch()

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy, averaged over all labels; the classes are the last dimension of the outputs."""
        return functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())


class EncoderLayer(nn.Module):
    """Self-attention and two position-wise layers, normalised first.

    The projections are separate linear layers, so that every K-FAC implementation captures all of them.
    """

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        """Make the layers."""
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.attention_norm, self.hidden_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map `[batch, positions, width]` to the same shape."""
        normed = self.attention_norm(tokens)
        query, key, value = (
            projection(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2)
        tokens = tokens + self.output(attended)
        tokens = tokens + self.down(functional.gelu(self.up(self.hidden_norm(tokens))))
        return tokens


class Encoder(nn.Module):
    """A transformer encoder that labels every byte of a sequence."""

    def __init__(
        self, *, layers: int = 4, width: int = 256, hidden: int = 1024, heads: int = 4, positions: int = 64
    ) -> None:
        """Make the layers; each keyword is a size."""
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(0.02 * torch.randn(positions, width))
        self.layers = nn.Sequential(*(EncoderLayer(width, hidden, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes `[batch, positions]` to logits `[batch, positions, 256]`."""
        logits: Tensor = self.head(self.norm(self.layers(self.embedding(tokens) + self.position)))
        return logits


WORKLOADS: dict[Name, Workload] = {
    "resnet32": Workload(
        title="CIFAR ResNet-32, batch 64",
        architecture=lambda: ResNet(depth=32, classes=10),
        batch=lambda: (torch.randn(64, 3, 32, 32), torch.randint(10, (64,))),
        reduction="mean",
    ),
    "encoder": Workload(
        title="4-layer transformer encoder, width 256, hidden 1024, 64 positions, batch 16",
        architecture=Encoder,
        batch=lambda: (torch.randint(256, (16, 64)), torch.randint(256, (16, 64))),
        reduction="tokens",
    ),
}

# Apart from the others, which every benchmark of workloads runs.
GPT2_SHAPES = Workload(
    title="12-layer transformer encoder in the shapes of GPT-2-small's blocks, 64 positions, batch 16",
    architecture=lambda: Encoder(layers=12, width=768, hidden=3072, heads=12),
    batch=WORKLOADS["encoder"].batch,
    reduction="tokens",
)
