"""Refresh rules as users would write them, through `natgrad.RefreshRule` alone."""

from dataclasses import dataclass
from zlib import crc32

import natgrad


class PowersOfTwo(natgrad.RefreshRule):
    """Decomposes all layers at steps 0, 1, 2, 4, 8, ..."""

    measure = "trace"

    def inverse_interval(self, step, reads="both"):
        return 1

    def due(self, step, candidates):
        return {one.layer for one in candidates} if step & (step - 1) == 0 else set()


@dataclass(frozen=True)
class RoundRobin(natgrad.RefreshRule):
    """Decomposes some layers in a step, and the others in those that follow."""

    groups: int = 2

    measure = "trace"

    def inverse_interval(self, step, reads="both"):
        return 1

    def due(self, step, candidates):
        return {one.layer for one in candidates if (crc32(one.layer.encode()) + step) % self.groups == 0}


@dataclass(frozen=True)
class LargestDrift(natgrad.RefreshRule):
    """Decomposes the `count` layers that have moved most."""

    count: int = 1
    interval: float = 2

    measure = "drift"

    def inverse_interval(self, step, reads="both"):
        return self.interval

    def due(self, step, candidates):
        return [one.layer for one in sorted(candidates, key=lambda one: -one.change)[: self.count]]
