"""The mean training loss of an epoch, summed up without waiting for the device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from natgrad.averaging.nodes import Grid


class MeanLoss:
    """Sums the losses of this rank's batches up; the mean over all ranks is asked for at the end of an epoch."""

    def __init__(self) -> None:
        """Begin with none."""
        self._sum: Tensor | float = 0.0
        self._count = 0

    def add(self, loss: Tensor | float | None) -> None:
        """Take the loss of a batch; None: not known."""
        if loss is not None:
            self._sum = self._sum + (loss.detach().double() if isinstance(loss, Tensor) else loss)
            self._count += 1

    def over(self, grid: Grid) -> float | None:
        """Return the mean over all batches of all ranks, and begin anew; None: none was known; collective."""
        found = grid.everywhere((float(self._sum), self._count))
        self._sum, self._count = 0.0, 0
        count = sum(number for _, number in found)
        return sum(loss for loss, _ in found) / count if count else None

    def state_dict(self) -> dict[str, Any]:
        """Return the sum, which waits for the device."""
        return {"sum": float(self._sum), "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a sum."""
        self._sum, self._count = state["sum"], state["count"]
