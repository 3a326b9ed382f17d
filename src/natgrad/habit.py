"""What mostly happens in a step, by which is guessed what will; and when to guess no more."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# Steps of which the most frequent count is expected: the last accumulation of an epoch is short.
_MEMORY = 4
# The most steps without a guess, after guesses that were wrong again and again.
_PATIENCE = 64


class Expected(Generic[Key]):
    """How often each of some things comes in a step: as often as it mostly has in the steps before.

    Attributes:
        counts: How often each has come in this step so far.
        totals: How often each is expected to; -1: nothing is known.
    """

    def __init__(self, keys: Iterable[Key]) -> None:
        """Begin with nothing seen."""
        self._seen: dict[Key, deque[int]] = {key: deque(maxlen=_MEMORY) for key in keys}
        self.begin()

    def begin(self) -> None:
        """Begin the next step."""
        self.counts = dict.fromkeys(self._seen, 0)
        self.totals = {key: _usual(seen) for key, seen in self._seen.items()}

    def learn(self) -> None:
        """Remember this step."""
        for key, count in self.counts.items():
            self._seen[key].append(count)

    def last(self, key: Key) -> bool:
        """Tell whether the next of a kind is the last one."""
        return self.counts[key] + 1 == self.totals[key]

    def complete(self, key: Key) -> bool:
        """Tell whether the last of a kind has just come."""
        return self.counts[key] == self.totals[key]


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
