"""The rows of one step, from the gradient hooks to the step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from natgrad.blocks import Stack
from natgrad.precision import at_least_float32
from natgrad.sums.messages import Tally


class Collected:
    """The pooled rows of this rank's layers, of all backward passes since the last step.

    Attributes:
        tallies: How many samples each layer has shown.
    """

    def __init__(self, stacks: Iterable[Stack], wire: torch.dtype | None) -> None:
        """Begin without rows.

        Args:
            stacks: Those whose curvature keeps rows.
            wire: The dtype in which rows travel; in bfloat16 they are kept so too. (Not in float16, in which the small
                ones would be lost that a message scales.)
        """
        self._stacks = {member.layer.name: stack for stack in stacks for member in stack.members}
        self._narrow = wire if wire == torch.bfloat16 else None
        self._rows: dict[str, list[tuple[Tensor, Tensor, float]]] = {}
        self.tallies = {name: Tally() for name in self._stacks}

    def add(self, layer: str, inputs: Tensor, gradients: Tensor, scale: float) -> None:
        """Keep the rows of one backward pass.

        Args:
            layer: The layer.
            inputs: Rows a ``[n, B, i]`` in memory that nobody else writes into.
            gradients: Rows g ``[n, B, o]``, times ``1 / scale``; copied.
            scale: What makes them those of per-sample losses.
        """
        dtype = self._narrow or self._stacks[layer].dtype
        own = inputs.to(dtype), gradients.to(dtype, copy=True)
        self._rows.setdefault(layer, []).append((*own, scale))

    def count(self, layer: str) -> int:
        """Return how many rows there are of a layer."""
        return sum(inputs.shape[1] for inputs, _, _ in self._rows.get(layer, ()))

    def take(self, layer: str, gain: float | Tensor) -> tuple[Tensor, Tensor]:
        """Give away the rows of a layer.

        Args:
            layer: The layer, which has been seen.
            gain: What makes gradients those of per-sample losses, beside the scale that they were added with.

        Returns:
            ``[n, m, i]`` and ``[n, m, o]``, in at least float32.
        """
        dtype, rows = at_least_float32(self._stacks[layer].work_dtype), self._rows.pop(layer)
        inputs = torch.cat([one.to(dtype) for one, _, _ in rows], 1)
        return inputs, torch.cat([one.to(dtype) * (scale * gain) for _, one, scale in rows], 1)

    def reset(self) -> None:
        """Begin the next step."""
        self._rows.clear()
        for name in self.tallies:
            self.tallies[name] = Tally()
