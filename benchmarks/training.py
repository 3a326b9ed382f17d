"""Jobs of the program, run one after the other by ranks that stay."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from natgrad.training.job import Job
from natgrad.training.loop import Training
from natgrad.training.result import Point, Result
from natgrad.training.world import World


class Curve:
    """Notes every step's loss, and after how many seconds of training it was known; on the leading rank alone.

    Attributes:
        seconds: Of training, evaluations left out.
        losses: Means over the ranks.
    """

    def __init__(self) -> None:
        """Note nothing yet."""
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._before = self._since = 0.0

    def start(self) -> None:
        """Begin to count seconds."""
        self._since = perf_counter()

    def step(self, training: Training, loss: float) -> None:
        """Note a step."""
        self.seconds.append(self._before + perf_counter() - self._since)
        self.losses.append(loss)

    def point(self, training: Training, point: Point) -> None:
        """Leave out the evaluation that made a point."""
        self._before, self._since = point.seconds, perf_counter()


def run(job: Job, hook: Callable[..., Any] | None = None) -> tuple[Result, Curve]:
    """Train a job on this process group; to be called on every rank.

    Args:
        job: What to train.
        hook: A communication hook of DDP.
    """
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    curve = Curve()
    training = Training(job.resolved(), world, observer=curve, stop=lambda: False)
    if hook is not None:
        assert isinstance(training._replica, DistributedDataParallel)
        training._replica.register_comm_hook(None, hook)
    dist.barrier()
    curve.start()
    result = training.run()
    if training.averager is not None:
        training.averager.detach()
    del training
    gc.collect()  # the wrapper's groups go with it
    return result, curve
