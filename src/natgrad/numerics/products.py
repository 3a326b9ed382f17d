"""How products of float32 matrices are computed: in full, and by the quickest routine that does so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import inf
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import _disable_current_modes

_FULL = ("none", "ieee")  # neither TF32 nor bfloat16 inside
_WORTH = 2e6  # multiply-adds of a product from which on oneDNN's calls cost less than they save
_MATMUL: Any = getattr(torch.backends.mkldnn, "matmul", None)  # from torch 2.9 on
_UNDISTURBED: WeakSet[Any] = WeakSet()  # work in threads, during which the setting stays as it is
_QUICK = "bf16"  # what torch is allowed so that it takes oneDNN, where that computes in full all the same


def leave_alone_for(work: object) -> None:
    """Take no other routine as long as `work` lives: a thread that multiplies beside would take it too, by chance."""
    _UNDISTURBED.add(work)


@contextmanager
def quick_products(device: torch.device, multiply_adds: float = inf) -> Iterator[None]:
    """Compute float32 products by the quickest full routine, unless the user allows less than full ones.

    On CPUs torch takes MKL for them, which needs twice the time of oneDNN on processors other than Intel's: on an EPYC
    with AVX-512 oneDNN is done in 0.7 of it at 128 rows and columns, in 0.45 from 256 on.

    Args:
        device: Where the products are computed.
        multiply_adds: Of each of them: a call of oneDNN takes 10 to 100 µs longer than MKL's.
    """
    if torch.compiler.is_compiling() or device.type != "cpu" or multiply_adds < _WORTH or not _onednn_is_full():
        yield
        return
    before = _MATMUL.fp32_precision
    if before not in _FULL or _UNDISTURBED:  # set by the user or, to be set back, by another thread
        yield
        return
    _MATMUL.fp32_precision = _QUICK
    try:
        yield
    finally:
        _MATMUL.fp32_precision = before


@contextmanager
def plain_products(device: torch.device, multiply_adds: float) -> Iterator[None]:
    """Compute products that are so small by torch's own routine, in full, inside `quick_products` for larger ones."""
    before = _MATMUL.fp32_precision if device.type == "cpu" and multiply_adds < _WORTH and _onednn_is_full() else None
    if torch.compiler.is_compiling() or before != _QUICK:
        yield
        return
    _MATMUL.fp32_precision = _FULL[-1]
    try:
        yield
    finally:
        _MATMUL.fp32_precision = before


@contextmanager
def full_products(device: torch.device) -> Iterator[None]:
    """Compute float32 products and convolutions as such: no TF32 or bfloat16 inside, and no autocast.

    Eigenvalues far below the largest, on which damping acts, would be lost in TF32's 10 bits. The user's settings are
    restored.
    """
    narrowed = [(place, name, value) for place, name, value in _settings(device) if value not in (*_FULL, False)]
    for place, name, value in narrowed:
        setattr(place, name, False if value is True else "ieee")
    try:
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield
    finally:
        for place, name, value in narrowed:
            setattr(place, name, value)


def _settings(device: torch.device) -> Iterator[tuple[Any, str, Any]]:
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


@cache
def _onednn_is_full() -> bool:
    """Whether oneDNN, allowed bfloat16 in float32 products, does not use it: it does where a processor has AMX."""
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    if not hasattr(_MATMUL, "fp32_precision") or not torch.backends.mkldnn.is_available() or has_tiles():
        return False
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        # bfloat16 has 8 bits; the user's default device and dtype are others, perhaps.
        beyond = torch.full((256, 256), 1 + 2.0**-12, dtype=torch.float32, device="cpu")
        before, _MATMUL.fp32_precision = _MATMUL.fp32_precision, "bf16"
        try:
            product = beyond @ beyond
        finally:
            _MATMUL.fp32_precision = before
    return bool((product / 256 - (1 + 2.0**-11)).abs().max() < 2.0**-20)
