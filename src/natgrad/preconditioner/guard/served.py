"""Which layers were preconditioned by their curvature in the steps so far."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from natgrad.linalg.joined import joined, together
from natgrad.state.block_group import LayerBlocks
from natgrad.state.failures import Level


class Served:
    """Remembers layers whose gradients were multiplied by curvature of their own in some step.

    Those that only a fallback served (the diagonal, or the plain gradient) are not among them.
    """

    def __init__(self) -> None:
        """Begin before the first step."""
        self._known: set[str] = set()
        # What accelerators know, which the host reads in `keys` alone: by the keys of layers, a flag for each of them.
        self._flags: dict[tuple[str, ...], Tensor] = {}

    def note(self, seen: Sequence[tuple[list[LayerBlocks], bool | Tensor]]) -> None:
        """Note what served layers in a step; nothing waits for an accelerator.

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
        """Return the keys of the layers; waits for accelerators."""
        for keys, flags in self._flags.items():
            self._known.update(key for key, flag in zip(keys, flags.tolist(), strict=True) if flag)
        self._flags.clear()
        return set(self._known)
