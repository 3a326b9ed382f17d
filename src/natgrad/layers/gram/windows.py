"""The sliding window of a convolution: which input element meets which kernel offset at which output position."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Window:
    """A convolution's geometry, one entry per spatial dimension."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # zeros before and after
    dilation: tuple[int, ...]

    @property
    def reach(self) -> tuple[int, ...]:
        """Distance between the first and the last element that the kernel meets."""
        return tuple(spread * (size - 1) for spread, size in zip(self.dilation, self.kernel_size, strict=True))

    def positions(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of output positions along each dimension of maps of these ``sizes``."""
        return tuple(
            (size + sum(sides) - reach - 1) // step + 1
            for size, sides, reach, step in zip(sizes, self.padding, self.reach, self.stride, strict=True)
        )

    def count_visits(self, maps: Tensor) -> Tensor:
        """Return at how many positions and offsets the window meets each element of ``maps [B, C, *spatial]``."""
        counts = maps.new_ones(())
        sizes = tuple(maps.shape[2:])
        for axis, positions in enumerate(self.positions(sizes)):
            first = torch.arange(positions, device=maps.device) * self.stride[axis] - self.padding[axis][0]
            offsets = torch.arange(self.kernel_size[axis], device=maps.device) * self.dilation[axis]
            met = (first[:, None] + offsets).flatten()
            inside = met[(met >= 0) & (met < sizes[axis])]
            counts = counts[..., None] * torch.bincount(inside, minlength=sizes[axis])
        return counts

    def columns(self, maps: Tensor, groups: int, piece: int) -> Iterator[Tensor]:
        """Yield the patches of ``maps [B, C, *spatial]``, copying about `piece` elements at a time.

        Yields:
            ``[n, i, m]``: m patches of i = C/n · Π kernel_size elements, ordered as ``weight.flatten(1)``.
        """
        ndim, batch, channels = len(self.kernel_size), len(maps), maps.shape[1] // groups
        positions = self.positions(tuple(maps.shape[2:]))
        sample = maps.shape[1] * math.prod(self.kernel_size) * math.prod(positions)
        width = channels * math.prod(self.kernel_size)
        for part in maps.tensor_split(pieces(batch, batch * sample, piece)):
            padded = F.pad(part, [side for sides in reversed(self.padding) for side in sides])
            sample_stride, channel_stride, *strides = padded.stride()
            offsets = [spread * stride for spread, stride in zip(self.dilation, strides, strict=True)]
            steps = [step * stride for step, stride in zip(self.stride, strides, strict=True)]
            lines = padded.as_strided(
                (groups, channels, *self.kernel_size, len(part), *positions),
                (channels * channel_stride, channel_stride, *offsets, sample_stride, *steps),
            )
            for patches in lines.tensor_split(pieces(positions[0], sample, piece), dim=3 + ndim):
                yield patches.reshape(groups, width, -1)


def pieces(length: int, elements: int, piece: int) -> int:
    """Return the number of parts, at most ``length``, of about ``piece`` of ``elements`` each."""
    return max(1, min(length, math.ceil(elements / piece)))
