"""``nn.ConvTranspose1d``, ``nn.ConvTranspose2d`` and ``nn.ConvTranspose3d``, with every option.

A transposed convolution is a convolution of stride 1 on the input with zeros between its elements.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from natgrad.layers.base import Slot
from natgrad.layers.convolution import ConvolutionLayer, PatchRows, flat_padding
from natgrad.layers.gram.windows import Window
from natgrad.layers.rows import Rows


class TransposedConvolutionLayer(ConvolutionLayer):
    """One block per group. Rows are *output* positions, columns those of ``weight.transpose(0, 1)`` of each group."""

    module: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d  # type: ignore[assignment]

    @override
    def block_sizes(self, weight: Tensor) -> tuple[int, int, int]:
        groups = self.module.groups
        return groups, weight.shape[1], len(weight) // groups * weight.shape[2:].numel()

    def align(self, slot: Slot, tensor: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Match the weight ``[n c, o, *kernel]`` with its blocks."""
        if slot.leaf != "weight":
            return super().align(slot, tensor, blocks)
        weight = tensor.unflatten(0, (self.blocks, -1))
        return weight, blocks.unflatten(2, (weight.shape[1], *self.module.kernel_size)).transpose(1, 2)

    def rows(self, inputs: Tensor, gradients: Tensor, samples: int) -> tuple[Rows, Rows]:
        """Return the rows with positions in reverse order, because kernel offsets count against the input's order."""
        spatial = tuple(range(-len(self.module.kernel_size), 0))
        return super().rows(inputs.flip(spatial), gradients.flip(spatial), samples)

    def _patches(self, maps: Tensor, positions: tuple[int, ...]) -> Rows:
        """Return the patches of reversed `maps`, for reversed output `positions`."""
        module, kernel = self.module, self.module.kernel_size
        lengths = [(size - 1) * step + 1 for size, step in zip(maps.shape[2:], module.stride, strict=True)]
        spread = maps.new_zeros(*maps.shape[:2], *lengths)
        spread[(slice(None), slice(None), *(slice(None, None, step) for step in module.stride))] = maps
        outside, padding = cast("tuple[int, ...]", module.padding), []
        for axis, (count, length) in enumerate(zip(positions, lengths, strict=True)):
            reach = module.dilation[axis] * (kernel[axis] - 1)
            padding.append((count + outside[axis] - length, reach - outside[axis]))
        # Negative padding removes elements.
        spread = F.pad(spread, flat_padding([(min(before, 0), min(after, 0)) for before, after in padding]))
        window = Window(
            kernel_size=kernel,
            stride=(1,) * len(kernel),
            padding=tuple((max(before, 0), max(after, 0)) for before, after in padding),
            dilation=module.dilation,
        )
        return PatchRows(spread, window, module.groups, bias=self.bias)
