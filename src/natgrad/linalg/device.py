"""What the kind of a device decides: whether the host may look at numbers, and how much to work on at once."""

from __future__ import annotations

import torch
from torch import Tensor


def on_host(place: Tensor | torch.device) -> bool:
    """Return whether the host can read a tensor, or tensors on a device, without waiting for the device."""
    device = place.device if isinstance(place, Tensor) else place
    return device.type == "cpu"


def known_all(mask: Tensor) -> bool:
    """Return whether all of a mask is known to be true. On an accelerator the host would have to wait: False."""
    return on_host(mask) and bool(mask.all())


def by_device(place: Tensor | torch.device, *, host: int, accelerator: int) -> int:
    """Return the number for a device: a CPU wants pieces that fit its caches, an accelerator few calls."""
    return host if on_host(place) else accelerator
