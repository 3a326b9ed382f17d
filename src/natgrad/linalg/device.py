"""What depends on the kind of device: reading values on the host, and the memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def on_host(place: Tensor | torch.device) -> bool:
    """Return whether the host can read tensors on this device without a synchronization."""
    return place.is_cpu if isinstance(place, Tensor) else place.type == "cpu"


def accelerators(model: nn.Module) -> list[torch.device]:
    """Return the accelerators that hold a model's parameters."""
    return sorted({p.device for p in model.parameters() if not (p.is_meta or on_host(p))}, key=str)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether a device has instructions for bfloat16 products, which take a fraction of float32's time."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    known: Any = getattr(torch.cpu, "get_capabilities", dict)  # not in older torch
    capabilities = known() if on_host(device) else {}
    return any(name.endswith("bf16") and fits for name, fits in capabilities.items())


def adds_in_float32(rows: Tensor) -> bool:
    """Return whether torch multiplies `rows` of 16 bits as they are and adds in float32: on CUDA, from torch 2.8 on."""
    if not rows.is_cuda or torch.version.cuda is None or "dtype" not in torch.ops.aten.mm.overloads():
        return False
    if rows.dtype == torch.bfloat16:
        return multiplies_bfloat16(rows.device)
    # Sums in float16, which the user may allow (torch 2.7 and later), cannot be had in float32.
    return rows.dtype == torch.float16 and not getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)


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


def known_finite(values: Tensor) -> bool:
    """Return whether all `values` and their sum are finite; False on an accelerator."""
    return on_host(values) and math.isfinite(values.sum())


def known_between(values: Tensor, low: float = -math.inf, high: float = math.inf) -> bool:
    """Return whether all `values` ``[n]`` are above `low` and below `high`, none nan; False on an accelerator."""
    return on_host(values) and all(low < value < high for value in values.tolist())


_FULL = ("none", "ieee")  # neither TF32 nor bfloat16 inside


@contextmanager
def full_products(device: torch.device) -> Iterator[None]:
    """Turn off TF32, bfloat16 and autocast in float32 products and convolutions, and restore the settings at the end.

    TF32's 10 bits would lose the small eigenvalues that are compared with the damping.
    """
    narrowed = [(place, name, value) for place, name, value in _settings(device) if value not in (*_FULL, False)]
    for place, name, value in narrowed:
        setattr(place, name, False if value is True else "ieee")
    try:
        with torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext():
            yield
    finally:
        for place, name, value in narrowed:
            setattr(place, name, value)


def _settings(device: torch.device) -> Iterator[tuple[Any, str, Any]]:
    """Yield the object, attribute and value of each torch setting for float32 products on `device`."""
    backends: Any = torch.backends
    if on_host(device):
        places = [getattr(backends.mkldnn, kind, None) for kind in ("matmul", "conv")]
    else:
        places = [backends.cuda.matmul, getattr(backends.cudnn, "conv", backends.cudnn)]
    for place in places:  # None has neither attribute
        for name in ("fp32_precision", "allow_tf32"):  # the first that exists; the latter before torch 2.9
            if hasattr(place, name):
                yield place, name, getattr(place, name)
                break
