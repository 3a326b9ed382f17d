"""Layers in the shapes of known networks, side by side: what a curvature costs there, without the network's own work.

Each layer is a linear one whose inputs and output gradients are drawn once, with spectra that fall as those of trained
networks do; a convolution stands for itself as the layer that its patches meet, one position a sample. What is
decomposed, solved and sent is the network's own; what factors cost to build is not, and is `benchmarks.step`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from natgrad.tasks.resnet import ResNet


@dataclass(frozen=True)
class Shape:
    """A layer: the inputs of its matrix, with the bias's constant 1 if it has one, and its outputs."""

    inputs: int
    outputs: int
    bias: bool = False


def resnet32() -> Iterator[Shape]:
    """Yield the layers of the CIFAR ResNet-32 (He 2016)."""
    for module in ResNet(depth=32, classes=10).modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            bias = module.bias is not None
            yield Shape(module.weight[0].numel() + bias, len(module.weight), bias)


def resnet50() -> Iterator[Shape]:
    """Yield the 54 layers of ResNet-50 (He 2016)."""
    yield Shape(3 * 49, 64)
    width = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from (Shape(width, planes), Shape(9 * planes, planes), Shape(planes, 4 * planes))
            if block == 0:
                yield Shape(width, 4 * planes)
            width = 4 * planes
    yield Shape(2049, 1000, bias=True)


def unet() -> Iterator[Shape]:
    """Yield the convolutions of the U-Net that HyLo trains (32 to 512 features), without the transposed ones."""
    before, widths = 3, (32, 64, 128, 256, 512)
    for width in widths:
        yield from (Shape(9 * before, width), Shape(9 * width, width))
        before = width
    for width in reversed(widths[:-1]):
        yield from (Shape(9 * 2 * width, width), Shape(9 * width, width))
    yield Shape(33, 1, bias=True)


def bert() -> Iterator[Shape]:
    """Yield the linear layers of BERT-base's encoder and of its head for question answering (Devlin 2019)."""
    for _ in range(12):
        yield from [Shape(769, 768, bias=True)] * 4
        yield from (Shape(769, 3072, bias=True), Shape(3073, 768, bias=True))
    yield Shape(769, 2, bias=True)


NETWORKS: dict[str, Callable[[], Iterator[Shape]]] = {
    "resnet32": resnet32,
    "unet": unet,
    "resnet50": resnet50,
    "bert": bert,
}


class Layers(nn.Module):
    """Layers side by side, each with its own rows ``a [B, i]`` and, from the loss, ``g [B, o]``."""

    def __init__(self, shapes: Iterator[Shape], samples: int, *, rank: int = 0, device: torch.device) -> None:
        """Draw parameters, the same on all ranks, and the rows of one of them, on the CPU; then move them."""
        super().__init__()
        torch.manual_seed(0)
        shapes = iter(list(shapes))
        self.layers = nn.ModuleList()
        self.rows: list[tuple[Tensor, Tensor]] = []
        generator = torch.Generator().manual_seed(1 + rank)
        for shape in shapes:
            self.layers.append(nn.Linear(shape.inputs - shape.bias, shape.outputs, bias=shape.bias))
            a, g = (_rows(samples, size, generator) for size in (shape.inputs - shape.bias, shape.outputs))
            self.rows.append((a.to(device), g.to(device)))
        self.to(device)
        self.samples = samples

    def forward(self, samples: Tensor) -> Tensor:
        """Return the loss of each of the ``samples [B, 1]``, whose values do not matter."""
        losses = [(layer(a) * g).sum(1, keepdim=True) for layer, (a, g) in zip(self.layers, self.rows, strict=True)]
        return torch.stack(losses).sum(0) + 0 * samples


def _rows(samples: int, size: int, generator: torch.Generator) -> Tensor:
    """Draw rows ``[B, d]`` whose covariance has eigenvalues that fall as 1 / k."""
    scale = torch.arange(1, size + 1).rsqrt()
    return torch.randn(samples, size, generator=generator) * scale
