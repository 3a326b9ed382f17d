"""``DistributedDataParallel`` around a model."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def find_replica(model: nn.Module) -> DistributedDataParallel | None:
    """Return the ``DistributedDataParallel`` around the user's module, also inside ``torch.compile``, or None."""
    while not isinstance(model, DistributedDataParallel):
        inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return None
        model = inner
    return model
