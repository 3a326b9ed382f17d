"""Collect the rows of a step for curvatures with gathered statistics."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from natgrad.capture.sums import SampleCount
from natgrad.linalg.precision import at_least_float32
from natgrad.state.block_group import BlockGroup


class RowBuffer:
    """The pooled rows of layers, of all backward passes since the last step.

    Attributes:
        wanted: Whether the next step needs rows.
        sample_counts: The sample count of each layer.
    """

    def __init__(self, groups: Iterable[BlockGroup], wire: torch.dtype | None) -> None:
        """Start without rows.

        Args:
            groups: The groups with gathered statistics.
            wire: The dtype in which rows are sent. bfloat16 rows are also stored in it. float16 rows are not, because
                small numbers need the scale of a message.
        """
        self._groups = {member.layer.name: group for group in groups for member in group.members}
        self._narrow = wire if wire == torch.bfloat16 else None
        self.wanted = True
        self.reset()

    def reset(self) -> None:
        """Begin the next step."""
        self._rows: dict[str, list[tuple[Tensor, Tensor, float]]] = {}
        self.sample_counts = {name: SampleCount() for name in self._groups}

    def add(self, layer: str, inputs: Tensor, gradients: Tensor, scale: float) -> None:
        """Store the rows of one backward pass.

        Args:
            layer: The layer.
            inputs: Rows a ``[n, B, i]``, which may not change afterwards.
            gradients: Rows g ``[n, B, o]``, copied.
            scale: The factor that makes the gradients those of per-sample losses.
        """
        dtype = self._narrow or self._groups[layer].dtype
        rows = inputs.to(dtype), gradients.to(dtype, copy=True), scale
        self._rows.setdefault(layer, []).append(rows)

    def count(self, layer: str) -> int:
        """Return the number of rows of a layer."""
        return sum(inputs.shape[1] for inputs, _, _ in self._rows.get(layer, ()))

    def take(self, layer: str, gain: float | Tensor) -> tuple[Tensor, Tensor]:
        """Remove and return the rows of a layer, ``[n, m, i]`` and ``[n, m, o]``, in at least float32.

        Do not change them: they may be the layer's inputs. `gain` is a further factor that makes gradients those of
        per-sample losses.
        """
        dtype, rows = at_least_float32(self._groups[layer].work_dtype), self._rows.pop(layer)
        inputs = [inputs.to(dtype) for inputs, _, _ in rows]
        gradients = [gradients.to(dtype) * (scale * gain) for _, gradients, scale in rows]
        if len(rows) == 1:
            return inputs[0], gradients[0]  # not copied
        return torch.cat(inputs, 1), torch.cat(gradients, 1)
