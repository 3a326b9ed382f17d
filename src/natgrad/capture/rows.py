"""The rows of one step, from the gradient hooks to the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.capture.sums.messages import SampleCount
from natgrad.linalg.precision import at_least_float32
from natgrad.state.block_group import BlockGroup


@dataclass(frozen=True)
class Origin:
    """Whose rows are shown: those of this process's rank or, where it does the step of all alone, of one after another.

    Attributes:
        rank: Whose.
        ranks: Of how many.
        together: Whether the rows of all of them stand for the batch; else those of a layer's one worker do.
    """

    rank: int = 0
    ranks: int = 1
    together: bool = True


class Collected:
    """The pooled rows of layers, of all backward passes since the last step.

    Attributes:
        origin: Whose rows the next ones are.
        wanted: Whether the coming step needs rows.
        tallies: How many samples each layer has shown.
    """

    def __init__(self, stacks: Iterable[BlockGroup], wire: torch.dtype | None, origin: Origin | None = None) -> None:
        """Begin without rows.

        Args:
            stacks: Those with gathered statistics.
            wire: The dtype in which rows travel; in bfloat16 they are kept so too. (Not in float16, in which the small
                ones would be lost that a message scales.)
            origin: Whose rows come; None: those of a process alone.
        """
        self._stacks = {member.layer.name: stack for stack in stacks for member in stack.members}
        self._narrow = wire if wire == torch.bfloat16 else None
        self.wanted = True
        self.origin = Origin() if origin is None else origin
        self._rows: dict[str, list[tuple[int, Tensor, Tensor, float]]] = {}
        self.tallies = {name: SampleCount() for name in self._stacks}

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
        self._rows.setdefault(layer, []).append((self.origin.rank, *own, scale))

    def counts(self, layer: str) -> dict[int, int]:
        """Return how many rows there are of a layer, by the ranks whose they are, in the order of `take`."""
        counts: dict[int, int] = {}
        for rank, inputs, _, _ in self._rows.get(layer, ()):
            counts[rank] = counts.get(rank, 0) + inputs.shape[1]
        return counts or {self.origin.rank: 0}

    def count(self, layer: str) -> int:
        """Return the most rows of a layer that a rank has."""
        return max(self.counts(layer).values())

    def take(self, layer: str, gain: float | Tensor) -> tuple[Tensor, Tensor]:
        """Give away the rows of a layer.

        Args:
            layer: The layer, which has been seen.
            gain: What makes gradients those of per-sample losses, beside the scale that they were added with.

        Returns:
            ``[n, m, i]`` and ``[n, m, o]``, in at least float32; to be read only, for they may be the layer's own.
        """
        dtype, rows = at_least_float32(self._stacks[layer].work_dtype), self._rows.pop(layer)
        inputs = joined([one.to(dtype) for _, one, _, _ in rows], 1)
        return inputs, joined([one.to(dtype) * (scale * gain) for _, _, one, scale in rows], 1)

    def reset(self) -> None:
        """Begin the next step."""
        self._rows.clear()
        for name in self.tallies:
            self.tallies[name] = SampleCount()


def joined(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate tensors; one alone is not copied."""
    return torch.cat(list(pieces), dim) if len(pieces) > 1 else pieces[0]
