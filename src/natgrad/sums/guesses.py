"""What is expected of a step, and what was summed in its forward pass before anything was known."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping

from torch import Tensor

# Captured steps of which the most frequent number of gradients is expected: the last accumulation of an epoch is short.
_MEMORY = 4
# The most captured steps in which nothing leaves early, after guesses that were wrong again and again.
_PATIENCE = 64


class Expected:
    """How many gradients each layer shows in a step: as many as it mostly has in the steps before.

    Attributes:
        counts: Those of this step so far.
        totals: Those that are expected of it; -1: nothing is known.
    """

    def __init__(self, layers: Iterable[str]) -> None:
        """Begin with nothing seen."""
        self._seen: dict[str, deque[int]] = {layer: deque(maxlen=_MEMORY) for layer in layers}
        self.begin()

    def begin(self) -> None:
        """Begin the next step."""
        self.counts = dict.fromkeys(self._seen, 0)
        self.totals = {layer: _usual(seen) for layer, seen in self._seen.items()}

    def learn(self) -> None:
        """Remember this step."""
        for layer, count in self.counts.items():
            self._seen[layer].append(count)

    def last(self, layer: str) -> bool:
        """Tell whether the next gradient of a layer is the last one."""
        return self.counts[layer] + 1 == self.totals[layer]

    def complete(self, layer: str) -> bool:
        """Tell whether the last gradient of a layer has just come."""
        return self.counts[layer] == self.totals[layer]


def _usual(counts: deque[int]) -> int:
    """Return the most frequent of some numbers, the larger of equally frequent ones; -1 if there are none."""
    return max(counts, key=lambda count: (counts.count(count), count), default=-1)


class Caution:
    """How long not to guess: after a guess that was wrong for a while, longer every time."""

    def __init__(self) -> None:
        """Begin without any."""
        self._steps = self._left = 0

    @property
    def waits(self) -> bool:
        """Whether nothing is to be guessed in this step."""
        return self._left > 0

    def learn(self, *, wrong: bool) -> None:
        """Take whether a guess was wrong in this step."""
        if wrong:
            self._left = self._steps = min(2 * self._steps + 1, _PATIENCE)
        elif self._left:
            self._left -= 1
        else:
            self._steps //= 2


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
