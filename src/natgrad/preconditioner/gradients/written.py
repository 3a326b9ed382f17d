"""Gradients that no backward pass has made before the eyes of the hooks: natural ones already, and unseen ones."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator

from torch import Tensor

from natgrad.errors import NatgradWarning
from natgrad.layers import Slot
from natgrad.state.block_group import BlockGroup
from natgrad.versions import BLIND


class WrittenGradients:
    """The gradients that the last step has written, and whether anybody has touched them since.

    A step without a backward pass before it would precondition them once more.
    """

    def __init__(self) -> None:
        """Begin before the first step."""
        self._versions: list[tuple[Slot, weakref.ref[Tensor], int]] = []

    def note(self, stacks: Iterable[BlockGroup]) -> None:
        """Note the gradients as they are now; none is kept alive."""
        self._versions = [
            (slot, weakref.ref(gradient), gradient._version)
            for slot in _slots(stacks)
            if (gradient := slot.parameter.grad) is not None
        ]

    def remain(self) -> bool:
        """Return whether any of them is still in its place, whatever was written into it since."""
        return any(known() is not None and known() is slot.parameter.grad for slot, known, _ in self._versions)

    def replaced(self) -> bool:
        """Return whether any gradient is a new tensor, or there was no step yet."""
        return not self._versions or any(
            slot.parameter.grad is not None and known() is not slot.parameter.grad for slot, known, _ in self._versions
        )

    def untouched(self) -> bool:
        """Return whether there are any, and all of them are still what they were."""
        return bool(self._versions) and all(
            (gradient := known()) is not None and gradient is slot.parameter.grad and gradient._version == version
            for slot, known, version in self._versions
        )


class Unseen:
    """Steps before which the hooks have seen no backward pass."""

    def __init__(self) -> None:
        """Begin before the first step."""
        self._warned = False

    def check(self, stacks: Iterable[BlockGroup], *, begins: bool) -> None:
        """Warn, once, of a step whose gradients come from no backward pass; called by the step itself.

        Args:
            stacks: All stacks.
            begins: Whether no backward pass was ever seen. Later on hooks need not see every one, and only gradients
                that do not exist tell.
        """
        if self._warned:
            return
        if all(slot.parameter.grad is None for slot in _slots(stacks)):
            message = (
                "step() comes without a backward pass, and there is nothing to precondition: call "
                "preconditioner.step() after loss.backward()"
            )
        elif begins:
            message = (
                "no backward pass of its layers was seen yet, and step() leaves their gradients as they are: "
                "differentiate without create_graph=True, and build the Preconditioner before a compiled function "
                f"calls the model{BLIND}"
            )
        else:
            return
        self._warned = True
        warnings.warn(f"natgrad: {message}", NatgradWarning, stacklevel=5)  # past `_begins`, `step` and its decorator


def _slots(stacks: Iterable[BlockGroup]) -> Iterator[Slot]:
    return (slot for stack in stacks for member in stack.members for slot in member.layer.slots)
