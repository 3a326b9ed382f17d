"""Whether gradients are averaged over the node before they are preconditioned."""

from __future__ import annotations

import warnings

from natgrad.errors import NatgradWarning
from natgrad.preconditioner import Preconditioner


class Order:
    """Looks whether a preconditioner has stepped since the last step of the averager."""

    def __init__(self, preconditioner: Preconditioner | None) -> None:
        """Note how far `preconditioner` is; None: there is nothing to look at."""
        self._preconditioner = preconditioner
        self.note()

    def check(self) -> None:
        """Warn if it has: called where each rank's gradient is still its own."""
        if self._stepped() > self._noted:
            told = "preconditioner.step() came before the average over the node: call daso.average_gradients() in front"
            warnings.warn(f"natgrad: {told} of it", NatgradWarning, stacklevel=3)

    def note(self) -> None:
        """Note how far it has come."""
        self._noted = self._stepped()

    def _stepped(self) -> int:
        return 0 if self._preconditioner is None else self._preconditioner.parts.progress.step
