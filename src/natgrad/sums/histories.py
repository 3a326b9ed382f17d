"""Which layers' sums of their inputs are equal to the last bit: queries, keys and values of one tensor.

No sums are compared. Those made of the same tensors in the same order and way are the same; so a layer whose history is
about to become that of another takes over the other's sums in place of making them once more.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import count


class Histories:
    """What the sums of each layer were made of in this step, as numbers: equal ones for equal histories."""

    def __init__(self, kinds: Mapping[str, Hashable]) -> None:
        """Begin before the first use.

        Args:
            kinds: For each layer that is to be followed, what all layers have in common whose sums may be the same.
        """
        self._kinds, self._numbers = kinds, count()
        self.forget()

    def forget(self) -> None:
        """Begin the next step."""
        self._now: dict[str, Hashable] = dict(self._kinds)
        self._after: dict[tuple[Hashable, Hashable], int] = {}
        self._latest: dict[Hashable, str] = {}

    def twin(self, layer: str, event: Hashable) -> str | None:
        """Return a layer that has by now the history that `layer` will have after `event`; None: there is none."""
        if event is None or layer not in self._now:
            return None
        after = self._after.get((self._now[layer], event))
        twin = self._latest.get(after)
        return twin if twin is not None and self._now[twin] == after else None

    def go_on(self, layer: str, event: Hashable) -> None:
        """Continue the history of a layer with something that it may share with others; None: that it does not."""
        if layer not in self._now:
            return
        number = next(self._numbers)
        after = number if event is None else self._after.setdefault((self._now[layer], event), number)
        self._now[layer] = after
        self._latest[after] = layer
