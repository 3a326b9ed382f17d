"""Which statistics of which layers a step collects, where it is not all of them."""

from __future__ import annotations

from dataclasses import dataclass

from natgrad.capture.sums.messages import Portion, portion_of
from natgrad.refresh.rule import SIDES, Side
from natgrad.state.block_group import BlockGroup


@dataclass(frozen=True)
class Choice:
    """What is collected of all that curvatures declare.

    Attributes:
        sides: Of the inputs (`BlockGroup.input_statistics`), of what needs gradients, or both.
        without: The names of the layers of which nothing is.
    """

    sides: frozenset[Side] = frozenset(SIDES)
    without: frozenset[str] = frozenset()

    def portion(self, layer: str, stack: BlockGroup) -> Portion | None:
        """Return the portion of the statistics of a layer; None: nothing."""
        if layer in self.without or not self.sides:
            return None
        if len(self.sides) == len(SIDES):
            return "whole"
        portion: Portion = "inputs" if "inputs" in self.sides else "rest"
        return portion if portion_of(stack, portion) else None


WHOLE = Choice()
