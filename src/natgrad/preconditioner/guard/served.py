"""Record which layers have been preconditioned by their curvature."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from natgrad.linalg.joined import joined, together
from natgrad.state.block_group import LayerBlocks
from natgrad.state.failures import Level


class Served:
    """The layers that were preconditioned by their curvature in any step, not only by a fallback."""

    def __init__(self) -> None:
        """Begin before the first step."""
        self._known: set[str] = set()
        # Flags on the device, by layer keys, which only `keys` reads.
        self._flags: dict[tuple[str, ...], Tensor] = {}

    def note(self, seen: Sequence[tuple[list[LayerBlocks], bool | Tensor]]) -> None:
        """Record the levels of layers in a step, without waiting for the device.

        Args:
            seen: Layers, and the level of each ``[m]``; True: all are fresh, False: all are plain.
        """
        told: list[tuple[list[str], Tensor]] = []
        for members, levels in seen:
            keys = [member.layer.key for member in members]
            if levels is False or self._known.issuperset(keys):
                continue
            if levels is True:
                self._known.update(keys)
            else:
                told.append((keys, levels))
        for some in together(told, lambda one: (one[1].device, one[1].dtype)):
            every, levels = tuple(key for keys, _ in some for key in keys), joined([levels for _, levels in some])
            flags = (levels >= Level.FRESH) & (levels <= Level.STALE)
            self._flags[every] = self._flags[every] | flags if every in self._flags else flags

    def keys(self) -> set[str]:
        """Return the keys of the layers. Waits for the device."""
        for keys, flags in self._flags.items():
            self._known.update(key for key, flag in zip(keys, flags.tolist(), strict=True) if flag)
        self._flags.clear()
        return set(self._known)
