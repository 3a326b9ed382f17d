"""What depends on the kind of device: reading values on the host, and the memory."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn


def on_host(place: Tensor | torch.device) -> bool:
    """Return whether the host can read tensors on this device without a synchronization."""
    device = place.device if isinstance(place, Tensor) else place
    return device.type == "cpu"


def accelerators(model: nn.Module) -> list[torch.device]:
    """Return the accelerators that hold a model's parameters."""
    return sorted({p.device for p in model.parameters() if not (p.is_meta or on_host(p))}, key=str)


def memory_of(device: torch.device) -> int | None:
    """Return the bytes of memory of a GPU, or of the machine for the host. None: they are unknown."""
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory
        return total
    if not on_host(device) or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def known_all(mask: Tensor) -> bool:
    """Return whether all of a mask is true; False on an accelerator, where reading it would synchronize."""
    return on_host(mask) and bool(mask.all())
