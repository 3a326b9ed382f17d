"""Ranges by which ``torch.profiler`` shows the stages of a step (docs/trouble.md)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

_NOTHING: AbstractContextManager[None] = nullcontext()


def profiled(stage: str) -> AbstractContextManager[None]:
    """Return a context that a profile shows as ``natgrad.<stage>``.

    While no profiler runs it does nothing, because a range of torch takes 7 µs also then, in each hook.
    """
    return record_function(f"natgrad.{stage}") if torch.autograd._profiler_enabled() else _NOTHING  # type: ignore[attr-defined]
