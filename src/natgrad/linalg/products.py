"""Products of float32 matrices in full precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from natgrad.linalg.device import on_host

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
        with torch.autocast(device.type, enabled=False):
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
    for place in places:
        for name in ("fp32_precision", "allow_tf32"):  # the latter before torch 2.9
            if hasattr(place, name):
                yield place, name, getattr(place, name)
                break
