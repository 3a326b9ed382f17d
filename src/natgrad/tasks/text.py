"""A small causal transformer that predicts the bytes of Python's standard library."""

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from natgrad.errors import NatgradError, require
from natgrad.tasks import facts
from natgrad.tasks.base import Evaluator, Task
from natgrad.tasks.evaluators import MeanLoss
from natgrad.tasks.facts import TEXT_TEST_EVERY

BYTES = 256


def sources() -> tuple[list[Path], list[Path]]:
    """Return the running interpreter's top-level library modules, sorted by name and split by file into (train, test).

    Raises:
        NatgradError: This Python was installed without its sources.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py"))
    if len(files) < TEXT_TEST_EVERY:
        raise NatgradError(
            f"the text task reads the standard library's sources, and {library} has {len(files)} of them",
            "missing-package",
        )
    train = [file for index, file in enumerate(files) if index % TEXT_TEST_EVERY]
    return train, files[::TEXT_TEST_EVERY]


def windows(files: list[Path], count: int, context: int) -> TensorDataset:
    """Cut `count` windows, evenly spaced over the files' bytes.

    Args:
        files: The files to read, in this order.
        count: The number of windows; they overlap if the text has fewer than `count * context` bytes.
        context: Length of a window in bytes.

    Returns:
        Pairs of bytes [context] and the bytes that follow each of them [context], int64.

    Raises:
        ValueError: The files are not longer than one window.
    """
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    require(context < len(text), "context", context, f"less than the text's {len(text)} bytes")
    starts = torch.linspace(0, len(text) - context - 1, count, dtype=torch.float64).long()
    cut = text[starts[:, None] + torch.arange(context + 1)].long()
    return TensorDataset(cut[:, :-1], cut[:, 1:])


class Attention(nn.Module):
    """Causal self-attention with four separate linear projections.

    Args:
        width: Features per position.
        heads: Attention heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [B, T, width] to the same shape."""
        query, key, value = (
            projection(inputs).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return projected


class Block(nn.Module):
    """A pre-norm transformer block: attention, then a perceptron four times as wide.

    Args:
        width: Features per position.
        heads: Attention heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [B, T, width] to the same shape."""
        attended = inputs + self.attention(self.attention_norm(inputs))
        result: Tensor = attended + self.perceptron(self.perceptron_norm(attended))
        return result


class Transformer(nn.Module):
    """A byte-level causal language model.

    Args:
        width: Features per position.
        heads: Attention heads per block.
        layers: Blocks.
        context: The longest sequence.
    """

    def __init__(self, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(context, width)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map bytes [B, T] to the logits of each next byte [B, T, 256]."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.bytes(inputs) + self.positions(places))))
        return logits


@dataclass(frozen=True, kw_only=True)
class Text(facts.Text, Task):
    """The data, model and loss of the task."""

    def load(self) -> tuple[TensorDataset, TensorDataset]:
        """Return bytes [context] with the bytes that follow them [context]."""
        train, test = sources()
        fewer = self.sequences // TEXT_TEST_EVERY
        return windows(train, self.sequences, self.context), windows(test, fewer, self.context)

    def model(self) -> nn.Module:
        """Build a network from [B, T] bytes to logits [B, T, 256]."""
        return Transformer(self.width, self.heads, self.layers, self.context)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy in nats, the mean over all positions."""
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def evaluator(self) -> Evaluator:
        """Return a metric of the cross-entropy in bits per byte."""
        return MeanLoss(lambda outputs, targets: self.loss(outputs, targets) / math.log(2))
