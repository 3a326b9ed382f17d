"""Gradients that are natural already: a step without a backward pass before it would precondition them once more."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

from natgrad.blocks import Stack
from natgrad.layers import Slot


class Given:
    """The gradients that the last step has written, and whether anybody has touched them since."""

    def __init__(self) -> None:
        """Begin before the first step."""
        self._versions: list[tuple[Slot, weakref.ref[Tensor], int]] = []

    def note(self, stacks: Iterable[Stack]) -> None:
        """Note the gradients as they are now; none is kept alive."""
        slots = (slot for stack in stacks for member in stack.members for slot in member.layer.slots)
        self._versions = [
            (slot, weakref.ref(gradient), gradient._version)
            for slot in slots
            if (gradient := slot.parameter.grad) is not None
        ]

    def untouched(self) -> bool:
        """Tell whether there are any, and all of them are still what they were."""
        return bool(self._versions) and all(
            (gradient := known()) is not None and gradient is slot.parameter.grad and gradient._version == version
            for slot, known, version in self._versions
        )
