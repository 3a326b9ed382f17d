"""All that nodes average in the cycling phase: each cargo by its own rule, all at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from natgrad.averaging.cargo import Cargo


class Freight:
    """Cargoes that are sent and settled together, in the same order on all ranks; parameters first."""

    def __init__(self, parameters: Cargo, *others: Cargo) -> None:
        """Send nothing yet."""
        self._all = [parameters, *others]

    def exchange(self, turn: int, *, at_once: bool) -> None:
        """Begin to average copies, or average `at_once`."""
        for cargo in self._all:
            if at_once:
                cargo.mean_(turn)
            else:
                cargo.send(turn)

    def settle(self, waited: int | None) -> None:
        """Wait for what is under way and join it; see `Cargo.settle`."""
        for cargo in self._all:
            cargo.settle(waited)

    def mean_others_(self, turn: int) -> None:
        """Average all but the parameters at once."""
        for cargo in self._all[1:]:
            cargo.mean_(turn)

    def state_dict(self) -> dict[str, Any]:
        """Return what is under way, once it has arrived."""
        return {cargo.name: cargo.state_dict() for cargo in self._all}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have under way what was under way then."""
        for cargo in self._all:
            cargo.load_state_dict(state.get(cargo.name))
