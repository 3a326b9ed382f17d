"""When the sums of layers are ready, as it is measured in the first steps."""

from __future__ import annotations

from time import perf_counter
from typing import TypeAlias

import torch

from natgrad.sums.messages import Portion

# The sums of a layer that leave together, by its name.
Item: TypeAlias = tuple[str, Portion]
_Stamp: TypeAlias = "float | torch.cuda.Event"


class Clock:
    """When items were last captured, in seconds: the host's, and on accelerators those of the device."""

    def __init__(self) -> None:
        """Begin with none."""
        self._stamps: dict[torch.device, dict[Item, _Stamp]] = {}

    def stamp(self, item: Item, device: torch.device) -> None:
        """Note the time of an item."""
        stamp: _Stamp = perf_counter()
        if device.type == "cuda":
            stamp = torch.cuda.Event(enable_timing=True)
            stamp.record(torch.cuda.current_stream(device))
        self._stamps.setdefault(device, {})[item] = stamp

    def forget(self, item: Item) -> None:
        """Drop the time of an item, if there is one."""
        for stamps in self._stamps.values():
            stamps.pop(item, None)

    def read(self) -> dict[Item, float]:
        """Return the seconds of each item since the first gradient on its device, and forget them; this waits for it.

        What was captured in the forward pass has negative ones.
        """
        seconds: dict[Item, float] = {}
        for stamps in self._stamps.values():
            some = next(iter(stamps.values()), 0.0)
            own = {item: _between(some, stamp) for item, stamp in stamps.items()}
            first = min((time for (_, portion), time in own.items() if portion != "early"), default=0.0)
            seconds.update({item: time - first for item, time in own.items()})
        self._stamps.clear()
        return seconds


def _between(start: _Stamp, end: _Stamp) -> float:
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    start.synchronize()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
