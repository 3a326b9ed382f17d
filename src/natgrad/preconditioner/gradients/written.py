"""Gradients that are already natural, and gradients from backward passes that the hooks did not see."""

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
    """The gradients that the last step wrote, and whether they have been changed since.

    A step without a backward pass would precondition them a second time.
    """

    def __init__(self) -> None:
        """Begin before the first step."""
        self._versions: list[tuple[Slot, weakref.ref[Tensor], int]] = []

    def note(self, groups: Iterable[BlockGroup]) -> None:
        """Record the present gradients, without keeping them alive."""
        self._versions = [
            (slot, weakref.ref(gradient), gradient._version)
            for slot in _slots(groups)
            if (gradient := slot.parameter.grad) is not None
        ]

    def remain(self) -> bool:
        """Return whether any of these tensors is still a parameter's ``.grad``, whatever its values."""
        return any(known() is not None and known() is slot.parameter.grad for slot, known, _ in self._versions)

    def replaced(self) -> bool:
        """Return whether any gradient is a new tensor, or no step has been taken."""
        return not self._versions or any(
            slot.parameter.grad is not None and known() is not slot.parameter.grad for slot, known, _ in self._versions
        )

    def untouched(self) -> bool:
        """Return whether there are recorded gradients and none has been changed."""
        return bool(self._versions) and all(
            (gradient := known()) is not None and gradient is slot.parameter.grad and gradient._version == version
            for slot, known, version in self._versions
        )


class Unseen:
    """Detects steps that no backward pass precedes."""

    def __init__(self) -> None:
        """Begin before the first step."""
        self._warned = False

    def check(self, groups: Iterable[BlockGroup], *, begins: bool) -> None:
        """Warn once if the gradients of this step come from no backward pass.

        Args:
            groups: All groups.
            begins: Whether the hooks have never seen a backward pass. Later they need not see every pass, and only
                missing gradients are a sign.
        """
        if self._warned:
            return
        if all(slot.parameter.grad is None for slot in _slots(groups)):
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
        warnings.warn(f"natgrad: {message}", NatgradWarning, stacklevel=5)  # the caller of `step`


def _slots(groups: Iterable[BlockGroup]) -> Iterator[Slot]:
    return (slot for group in groups for member in group.members for slot in member.layer.slots)
