"""Collect the rows of a step for curvatures with gathered statistics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.capture.sums import SampleCount
from natgrad.linalg.precision import at_least_float32
from natgrad.state.block_group import BlockGroup


@dataclass(frozen=True)
class Origin:
    """The rank that the next rows belong to. `verify`, which simulates all ranks, changes it.

    Attributes:
        rank: The rank.
        ranks: The number of ranks.
        pools_ranks: Whether the rows of all ranks are used; otherwise those of a layer's only worker.
    """

    rank: int = 0
    ranks: int = 1
    pools_ranks: bool = True


class RowBuffer:
    """The pooled rows of layers, of all backward passes since the last step.

    Attributes:
        origin: The rank that the next rows belong to.
        wanted: Whether the next step needs rows.
        sample_counts: The sample count of each layer.
    """

    def __init__(self, groups: Iterable[BlockGroup], wire: torch.dtype | None, origin: Origin | None = None) -> None:
        """Start without rows.

        Args:
            groups: The groups with gathered statistics.
            wire: The dtype in which rows are sent. bfloat16 rows are also stored in it. float16 rows are not, because
                small numbers need the scale of a message.
            origin: The rank that the rows belong to. None: there is one process.
        """
        self._groups = {member.layer.name: group for group in groups for member in group.members}
        self._narrow = wire if wire == torch.bfloat16 else None
        self.wanted = True
        self.origin = Origin() if origin is None else origin
        self.reset()

    def reset(self) -> None:
        """Begin the next step."""
        self._rows: dict[str, list[tuple[int, Tensor, Tensor, float]]] = {}
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
        rows = self.origin.rank, inputs.to(dtype), gradients.to(dtype, copy=True), scale
        self._rows.setdefault(layer, []).append(rows)

    def counts(self, layer: str) -> dict[int, int]:
        """Return the number of rows of a layer by rank, in the order of `take`."""
        counts: dict[int, int] = {}
        for rank, inputs, _, _ in self._rows.get(layer, ()):
            counts[rank] = counts.get(rank, 0) + inputs.shape[1]
        return counts or {self.origin.rank: 0}

    def count(self, layer: str) -> int:
        """Return the largest number of rows of a layer on any rank."""
        return max(self.counts(layer).values())

    def take(self, layer: str, gain: float | Tensor) -> tuple[Tensor, Tensor]:
        """Remove and return the rows of a layer, ``[n, m, i]`` and ``[n, m, o]``, in at least float32.

        Do not change them: they may be the layer's inputs. `gain` is a further factor that makes gradients those of
        per-sample losses.
        """
        dtype, rows = at_least_float32(self._groups[layer].work_dtype), self._rows.pop(layer)
        inputs = [inputs.to(dtype) for _, inputs, _, _ in rows]
        gradients = [gradients.to(dtype) * (scale * gain) for _, _, gradients, scale in rows]
        if len(rows) == 1:
            return inputs[0], gradients[0]  # not copied
        return torch.cat(inputs, 1), torch.cat(gradients, 1)
