"""What was summed in the forward pass of a step, before anything was known."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import Tensor


class Guesses:
    """The packed early statistics of one use of each layer, from its forward pass to its gradient.

    Attributes:
        proven: The layers for whose use the gradient came, in this step.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._open: dict[str, tuple[weakref.ref[object], Mapping[str, Tensor]]] = {}
        self.proven: set[str] = set()

    def begin(self) -> None:
        """Begin the next step."""
        self._open.clear()
        self.proven.clear()

    def pending(self, layer: str) -> bool:
        """Tell whether there is one of a layer, for a use whose gradient may come yet."""
        return layer in self._open and self._open[layer][0]() is not None

    def make(self, layer: str, use: object, sums: Mapping[str, Tensor]) -> None:
        """Guess that a use of a layer counts."""
        self._open[layer] = weakref.ref(use), sums

    def prove(self, layer: str, use: object) -> Mapping[str, Tensor]:
        """Return that of a use whose gradient has come; nothing, if there is none."""
        if layer not in self._open or self._open[layer][0]() is not use:
            return {}
        self.proven.add(layer)
        return self._open.pop(layer)[1]

    def of(self, layer: str) -> Mapping[str, Tensor]:
        """Return that of a layer, for which no gradient has come; nothing, if there is none."""
        return self._open[layer][1] if layer in self._open else {}

    def drop(self) -> set[str]:
        """Drop all for which no gradient has come, and return their layers."""
        dropped = set(self._open)
        self._open.clear()
        return dropped
