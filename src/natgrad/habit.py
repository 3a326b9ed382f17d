"""What mostly happens in a step, by which is guessed what will; and when to guess no more."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# Steps of which the most frequent count is expected: the last accumulation of an epoch is short.
_MEMORY = 4
# The most steps without a guess, after guesses that were wrong again and again.
_PATIENCE = 64


class Habit(Generic[Key]):
    """How often each of some things comes in a step, as it mostly did in the steps before.

    Attributes:
        counts: How often each has come in this step.
        expected: How often each mostly came; -1 before the first step.
    """

    def __init__(self, keys: Iterable[Key]) -> None:
        """Expect nothing yet."""
        self._seen: dict[Key, deque[int]] = {key: deque(maxlen=_MEMORY) for key in keys}
        self._pause = self._caution = 0
        self.begin()

    def begin(self) -> None:
        """Begin the next step."""
        self.counts = dict.fromkeys(self._seen, 0)
        self.expected = {key: _usual(seen) for key, seen in self._seen.items()}

    def came(self, key: Key) -> bool:
        """Count one that has come; tell whether it is expected to be the last of its kind in this step."""
        self.counts[key] += 1
        return self.counts[key] == self.expected[key]

    @property
    def paused(self) -> bool:
        """Whether it is better not to act on what is expected."""
        return self._pause > 0

    def learn(self, *, wrong: bool) -> None:
        """End a step: expect what it has shown; after a wrong guess pause for a while, longer every time."""
        for key, count in self.counts.items():
            self._seen[key].append(count)
        if wrong:
            self._caution = min(2 * self._caution + 1, _PATIENCE)
            self._pause = self._caution
        elif self._pause:
            self._pause -= 1
        else:
            self._caution //= 2


def _usual(counts: Sequence[int]) -> int:
    """Return the most frequent of some numbers, the larger of equally frequent ones; -1 if there are none."""
    return max(counts, key=lambda count: (counts.count(count), count), default=-1)
