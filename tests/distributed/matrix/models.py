"""Five small models of the kinds people train, each with the batch and the loss it is trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SAMPLES = 16
CLASSES, VOCABULARY, LENGTH, WIDTH = 5, 24, 6, 16


class Model(nn.Module):
    """A stack of blocks that may be checkpointed.

    Attributes:
        blocks: What is checkpointed, and sharded, one by one.
        checkpointing: Whether the blocks' activations are recomputed in the backward pass.
    """

    blocks: nn.ModuleList
    checkpointing = False

    def through(self, block: nn.Module, *inputs: Tensor) -> Tensor:
        if self.checkpointing:
            result: Tensor = checkpoint(block, *inputs, use_reentrant=False)
            return result
        return block(*inputs)


class _Residual(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        inputs = width // stride
        self.first = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.short = nn.Conv2d(inputs, width, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.short(x) + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


class ResNet(Model):
    """Convolutions, batch norms and skips, as on CIFAR."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.blocks = nn.ModuleList([_Residual(4, 1), _Residual(8, 2)])
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = self.through(block, x)
        return self.head(x.mean((2, 3)))


class Encoder(Model):
    """``nn.TransformerEncoderLayer``, with PyTorch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = self.through(block, x)
        return self.head(x.mean(1))


class _CausalBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        heads = (each(y).unflatten(-1, (2, -1)).transpose(1, 2) for each in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(Model):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(_CausalBlock() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]).expand_as(ids))
        for block in self.blocks:
            x = self.through(block, x)
        return self.head(self.norm(x))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for inputs in x.unbind(1):
            state = self.cell(inputs, state)
        assert state is not None
        return state[0]


class LSTM(Model):
    """A recurrent classifier of token sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList([_Recurrent()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.through(self.blocks[0], self.tokens(ids)))


class _Level(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class UNet(Model):
    """A segmentation network that halves, and doubles again by transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Level(3, 4), _Level(4, 8), _Level(8, 4)])
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.through(self.blocks[0], x)
        deep = self.through(self.blocks[1], F.max_pool2d(skip, 2))
        joined = torch.cat([skip, self.up(deep)], 1)
        return self.head(self.through(self.blocks[2], joined))


@dataclass(frozen=True)
class Task:
    """A model with its data.

    Attributes:
        model: Its class.
        inputs: Makes a global batch of inputs.
        targets: Makes the targets of that batch.
        loss: The mean loss of outputs and targets.
        reduction: What it averages over.
        whole: Whether a batch in parts gives what the whole gives; batch norm sees each part by itself.
    """

    model: type[Model]
    inputs: Callable[[torch.Generator], Tensor]
    targets: Callable[[torch.Generator], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    reduction: Literal["mean", "tokens"] = "mean"
    whole: bool = True


def _images(generator: torch.Generator) -> Tensor:
    return torch.randn(SAMPLES, 3, 8, 8, generator=generator)


def _classes(generator: torch.Generator) -> Tensor:
    return torch.randint(CLASSES, (SAMPLES,), generator=generator)


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)


def _classify(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.float(), targets)


TASKS = {
    "ResNet": Task(ResNet, _images, _classes, _classify, whole=False),
    "encoder": Task(Encoder, lambda g: torch.randn(SAMPLES, LENGTH, 3, generator=g), _classes, _classify),
    "GPT, tied head": Task(
        GPT, _tokens, _tokens, lambda outputs, targets: _classify(outputs.flatten(0, 1), targets.flatten()), "tokens"
    ),
    "LSTM": Task(LSTM, _tokens, _classes, _classify),
    "U-Net": Task(UNet, _images, lambda g: torch.randint(3, (SAMPLES, 8, 8), generator=g), _classify),
}
