"""Peak memory of this process."""

from __future__ import annotations

import resource
import sys

import torch


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes: allocated on a GPU, resident for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
