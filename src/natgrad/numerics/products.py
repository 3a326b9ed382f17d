"""How products of float32 matrices are computed: in full, and by the quickest routine that does so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_FULL = (False, "none", "ieee")  # neither TF32 nor bfloat16 inside
_Setting = tuple[Any, str, Any]  # where torch keeps it, its name, its value


@contextmanager
def quick_products(device: torch.device) -> Iterator[None]:
    """Compute products by the quickest full routine, unless the user allows less than full ones.

    On CPUs torch takes MKL for float32, which needs twice the time of oneDNN on processors other than Intel's: from 128
    rows and columns on, 0.45-0.7 of it is enough on an EPYC with AVX-512.
    """
    with _set((place, name, _quickest(place)) for place, name, value in _settings(device) if value in _FULL):
        yield


@contextmanager
def full_products(device: torch.device) -> Iterator[None]:
    """Compute float32 products and convolutions as such: no TF32 or bfloat16 inside, and no autocast.

    Eigenvalues far below the largest, on which damping acts, would be lost in TF32's 10 bits. The user's settings are
    restored.
    """
    with _set(
        (place, name, False if isinstance(value, bool) else _quickest(place))
        for place, name, value in _settings(device)
    ):
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield


def _settings(device: torch.device) -> Iterator[_Setting]:
    """Yield where torch keeps what it may do to float32 products on `device`, under which name, and its value."""
    backends: Any = torch.backends
    if device.type == "cpu":
        places = [getattr(backends.mkldnn, kind, None) for kind in ("matmul", "conv")]
    else:
        places = [backends.cuda.matmul, getattr(backends.cudnn, "conv", backends.cudnn)]
    for place in places:
        for name in ("fp32_precision", "allow_tf32"):  # the latter before torch 2.9
            if hasattr(place, name):
                yield place, name, getattr(place, name)
                break


@contextmanager
def _set(settings: Iterable[_Setting]) -> Iterator[None]:
    changed = [
        (place, name, value, before)
        for place, name, value in settings
        if (before := getattr(place, name)) != value and not (before in _FULL and value in _FULL)
    ]
    for place, name, value, _ in changed:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, _, before in changed:
            setattr(place, name, before)


def _quickest(place: Any) -> str:
    """Return the setting by which full products are quickest."""
    return "bf16" if place is getattr(torch.backends.mkldnn, "matmul", None) and _onednn_is_full() else "ieee"


@cache
def _onednn_is_full() -> bool:
    """Whether oneDNN, allowed bfloat16 in float32 products, does not use it: it does where a processor has AMX."""
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    if not hasattr(matmul, "fp32_precision") or not torch.backends.mkldnn.is_available() or has_tiles():
        return False
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        beyond = torch.full((256, 256), 1 + 2.0**-12)  # bfloat16 has 8 bits
        before = matmul.fp32_precision
        matmul.fp32_precision = "bf16"
        try:
            product = beyond @ beyond
        finally:
            matmul.fp32_precision = before
    return bool((product / 256 - (1 + 2.0**-11)).abs().max() < 2.0**-20)
