"""Which ranks the norm layers of a model share their statistics with."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from natgrad.errors import require


def check_norm_groups(model: nn.Module, node: Iterable[int], averager: str) -> None:
    """Check that ``SyncBatchNorm`` computes its statistics over ranks of the own node alone.

    Over more it sends a message between nodes in each forward and backward pass, which all nodes wait for.

    Args:
        model: The user's own module.
        node: The ranks of the node.
        averager: What the averager is called.

    Raises:
        ValueError: naming the first module that does not.
    """
    if not dist.is_initialized():
        return
    own = sorted(node)
    allowed = (
        f"over ranks of its node alone ({own}): between nodes {averager} averages. Give it process_group=, as "
        'nn.SyncBatchNorm.convert_sync_batchnorm(model, mesh.get_group("local"))'
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            found = sorted(dist.get_process_group_ranks(module.process_group))
            where = f"{name or type(model).__name__}: SyncBatchNorm over ranks {found}"
            require(set(found) <= set(own), "model", where, allowed)
