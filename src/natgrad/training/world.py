"""The ranks of a run: who am I, how many are we, what do we tell each other."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from natgrad.errors import require

from .job import Device

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World:
    """This rank among its fellows.

    Attributes:
        rank: Own number, from 0.
        size: Number of ranks.
        device: Where this rank computes.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.rank == 0

    def maxima(self, *values: float) -> list[float]:
        """Return the largest of each value over the ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def totals(self, *values: float) -> list[float]:
        """Return the sum of each value over the ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor.tolist()

    def agree(self, value: T) -> T:
        """Return the leader's value on every rank."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, 0)
        return values[0]

    def share_buffers(self, buffers: Iterator[Tensor]) -> None:
        """Give every rank the leader's buffers, such as running means, which differ between ranks after a forward."""
        if self.size > 1:
            for buffer in buffers:
                dist.broadcast(buffer, 0)


def check_devices(device: Device, workers: int) -> None:
    """Check that this machine has a device for each of its ranks.

    Raises:
        ValueError: It has no GPU, or fewer than ranks.
    """
    require(device != "cuda" or torch.cuda.is_available(), "device", device, "cpu or auto: torch finds no GPU here")
    if _uses_gpu(device):
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", workers)), torch.cuda.device_count()
        require(here <= gpus, "workers", here, f"at most {gpus}, the GPUs here, unless device is cpu")


def _uses_gpu(device: Device) -> bool:
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


@contextmanager
def join(device: Device) -> Iterator[World]:
    """Join the process group that a launcher announced in the environment, if any, and leave it at the end."""
    use_gpu = _uses_gpu(device)
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(own)
    if not launched():
        yield World(rank=0, size=1, device=own)
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_gpu else "gloo")
    try:
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=own)
    finally:
        # DistributedDataParallel must go first: the last owner of a gloo group frees it and joins its threads, and
        # unlike `destroy_process_group` it holds the interpreter's lock meanwhile, for which those threads may wait.
        gc.collect()
        dist.destroy_process_group()


def launched() -> bool:
    """Return whether a launcher (torchrun, or our own) started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What all ranks know of one step.

    Attributes:
        loss: Mean over the ranks.
        samples: Of all ranks.
        stop: Whether any rank was told to stop.
    """

    loss: float
    samples: int
    stop: bool


class Pulse:
    """One small message a step, read a step after it was sent: no rank waits for it, and all read the same."""

    def __init__(self, world: World) -> None:
        """Start with nothing under way."""
        self._world = world
        self._sent: tuple[Tensor, Any, int] | None = None

    def exchange(self, loss: Tensor, samples: int, stop: bool) -> Beat | None:
        """Send this step's loss on this rank and return what was sent before, or None where nothing was."""
        received = self.flush()
        message = torch.stack([loss.detach().double() / self._world.size, loss.new_tensor(stop, dtype=torch.float64)])
        work = dist.all_reduce(message, async_op=True) if self._world.size > 1 else None
        self._sent = message, work, samples
        return received

    def flush(self) -> Beat | None:
        """Return what was sent last and is not yet received, or None."""
        if self._sent is None:
            return None
        (message, work, samples), self._sent = self._sent, None
        if work is not None:
            work.wait()
        loss, stop = message.tolist()
        return Beat(loss=loss, samples=samples, stop=stop > 0)


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Turn SIGINT, SIGTERM and the launcher's death into a question that the loop asks after each step."""
    asked = False
    # A forked rank's parent is the fork server, which outlives the launcher.
    parent, launcher = os.getppid(), multiprocessing.parent_process()

    def remember(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    previous = {each: signal.signal(each, remember) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked or os.getppid() != parent or (launcher is not None and not launcher.is_alive())
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
