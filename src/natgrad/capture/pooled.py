"""Rows summed over positions, and over the uses of a layer in one backward pass (sharing by *reduce*)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from natgrad.layers.rows import DenseRows


@dataclass
class Pooled:
    """The pooled rows of all uses of a layer in one backward pass.

    Attributes:
        task: The pass.
        inputs: Their sum over positions ``[n, B, i]``.
        gradients: The same ``[n, B, o]``.
        positions: How many were summed.
        scale: What makes the gradients those of per-sample losses.
        rounding: Of the gradients before they were summed, where it is asked for (of layers with a second pass).
    """

    task: int
    inputs: Tensor
    gradients: Tensor
    positions: int
    scale: float
    rounding: Tensor | None = None

    def add(self, inputs: Tensor, gradients: Tensor, positions: int, rounding: Tensor | None) -> None:
        """Add those of another use."""
        self.inputs, self.gradients = self.inputs + inputs, self.gradients + gradients
        self.positions += positions
        if self.rounding is not None and rounding is not None:
            self.rounding = self.rounding + rounding

    def rows(self, *, one_hot: bool) -> tuple[DenseRows, DenseRows]:
        """Return the mean of a and the sum of g over positions, in memory of their own as far as a goes."""
        inputs = DenseRows((self.inputs / self.positions)[:, :, None], one_hot=one_hot)
        return inputs, DenseRows(self.gradients[:, :, None], rounding=self.rounding)
