"""Jobs of the program, run one after the other by ranks that stay."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from natgrad.training.display import Silent
from natgrad.training.job import Job
from natgrad.training.loop import Training
from natgrad.training.result import Result
from natgrad.training.world import World


def run(job: Job, hook: Callable[..., Any] | None = None) -> Result:
    """Train a job on this process group; to be called on every rank.

    Args:
        job: What to train.
        hook: A communication hook of DDP.
    """
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    training = Training(job.resolved(), world, watch=Silent(), stop=lambda: False)
    if hook is not None:
        assert isinstance(training._replica, DistributedDataParallel)
        training._replica.register_comm_hook(None, hook)
    dist.barrier()
    result = training.run()
    if training.averager is not None:
        training.averager.detach()
    del training
    gc.collect()  # the wrapper's groups go with it
    return result
