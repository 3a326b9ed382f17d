"""Parameters that travel in few bits: as differences from values that all nodes have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from natgrad.averaging.messages import Packing
from natgrad.errors import require


class DeltaCompression:
    """Has the differences of tensors from a shared reference sent in a narrow dtype.

    Parameters that are cast to 16 bits themselves cannot follow steps below their own rounding: at a small learning
    rate training stops. Their differences from the last values that all nodes had in common are rounded relative to
    themselves. With the merge "delta" what was rounded off stays in the node's parameters, and leaves with the next
    exchange.

    Attributes:
        wire: The dtype of the differences on the wire.
        reference: The shared values, as messages in full precision, the same bits on all ranks that hold the same
            tensors; empty where there are none.
    """

    def __init__(self, wire: torch.dtype) -> None:
        """Allocate nothing yet."""
        self.wire = wire
        self.reference: list[Tensor] = []
        self._packing = Packing([])

    def start(self, packing: Packing, tensors: Sequence[Tensor]) -> None:
        """Take tensors that are equal on all nodes as the reference, unless there is one.

        Args:
            packing: The layout of `tensors` in messages.
            tensors: The tensors, which are copied.
        """
        if not self.reference:
            self._zero(packing)
            packing.pack(tensors, self.reference)

    def drop(self) -> None:
        """Free the reference."""
        self.reference, self._packing = [], Packing([])

    def prepare(self, packing: Packing) -> torch.dtype | None:
        """Make sure that there is a reference for messages of a layout; return the dtype that they may travel in.

        Without one it is zero, which all nodes have in common: the tensors then travel as they are (None).
        """
        if self.reference and self._packing is packing:
            return self.wire
        self._zero(packing)
        return None

    def move_(self, differences: Sequence[Tensor], scale: float = 1.0) -> None:
        """Add `scale` times differences, the same on all nodes, to the reference."""
        if self.reference:
            torch._foreach_add_(self.reference, list(differences), alpha=scale)

    def state_dict(self) -> list[Tensor]:
        """Return the reference on the host."""
        return [vector.cpu().clone() for vector in self.reference]

    def load_state_dict(self, state: Sequence[Tensor], packing: Packing) -> None:
        """Restore a reference for messages of a layout.

        Raises:
            ValueError: if it is of other sizes.
        """
        wanted, found = [message.numel for message in packing.messages], [len(vector) for vector in state]
        require(found == wanted, "state (anchor)", found, f"messages of {wanted}: this rank's own state")
        self._zero(packing)
        for vector, saved in zip(self.reference, state, strict=True):
            vector.copy_(saved)

    def _zero(self, packing: Packing) -> None:
        self.reference, self._packing = packing.empty(), packing
        for vector in self.reference:
            vector.zero_()
