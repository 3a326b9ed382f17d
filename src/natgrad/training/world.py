"""The ranks of a run and their communication."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
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
    """The rank of this process, and collectives over all ranks.

    Attributes:
        rank: The rank of this process.
        size: The number of ranks.
        device: The device of this rank.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which writes files and shows progress."""
        return self.rank == 0

    def maxima(self, *values: float) -> list[float]:
        """Return the maximum of each value over the ranks."""
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
        """Return rank 0's value on every rank."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, 0)
        return values[0]

    def union(self, values: Iterable[str]) -> set[str]:
        """Return the values of all ranks."""
        values = [*values]
        parts = [values]
        if self.size > 1:
            parts = [[] for _ in range(self.size)]
            dist.all_gather_object(parts, values)
        return {value for part in parts for value in part}

    def share_buffers(self, buffers: Iterator[Tensor]) -> None:
        """Broadcast rank 0's buffers, such as running means, which differ between ranks after a forward pass."""
        if self.size > 1:
            for buffer in buffers:
                dist.broadcast(buffer, 0)


def check_devices(device: Device, workers: int) -> None:
    """Check that this machine has a device for each of its ranks.

    Raises:
        ValueError: There is no GPU, or there are fewer GPUs than ranks.
    """
    require(device != "cuda" or torch.cuda.is_available(), "device", device, "cpu or auto: torch finds no GPU here")
    if uses_gpu(device):
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", workers)), torch.cuda.device_count()
        require(here <= gpus, "workers", here, f"at most {gpus}, the GPUs here, unless device is cpu")


def uses_gpu(device: Device) -> bool:
    """Return whether ranks train on a GPU."""
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


@contextmanager
def join(device: Device) -> Iterator[World]:
    """Join the process group of a launcher, if there is one, and destroy it at the end."""
    use_gpu = uses_gpu(device)
    chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(chosen)
    if not launched():
        yield World(rank=0, size=1, device=chosen)
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_gpu else "gloo")
    try:
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=chosen)
    finally:
        # Delete DistributedDataParallel first: the last owner of a gloo group joins its threads, and unlike
        # `destroy_process_group` it holds the interpreter lock, so that threads that wait for the lock would deadlock.
        gc.collect()
        dist.destroy_process_group()


def launched() -> bool:
    """Return whether a launcher, such as torchrun, started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """One step, summed up over all ranks.

    Attributes:
        loss: Mean loss over the ranks.
        samples: Samples of all ranks.
        stop: Whether any rank should stop.
        save: Whether a checkpoint is due.
    """

    loss: float
    samples: int
    stop: bool
    save: bool


class StepMessages:
    """One small asynchronous all-reduce per step, whose result is read one step later."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sent: tuple[Tensor, Any, int] | None = None

    def exchange(self, loss: Tensor, samples: int, *, stop: bool, save: bool) -> StepSummary | None:
        """Send this rank's loss and return the summary of the previous step, or None before the second step.

        Args:
            loss: The mean loss of this rank.
            samples: Samples of all ranks.
            stop: Whether this rank should stop.
            save: Whether this rank finds that a checkpoint is due.
        """
        received = self.flush()
        flags = loss.new_tensor([stop, save], dtype=torch.float64)
        message = torch.cat([loss.detach().double().view(1) / self._world.size, flags])
        work = dist.all_reduce(message, async_op=True) if self._world.size > 1 else None
        self._sent = message, work, samples
        return received

    def flush(self) -> StepSummary | None:
        """Return the summary of the last message, or None if there is none to receive."""
        if self._sent is None:
            return None
        (message, work, samples), self._sent = self._sent, None
        if work is not None:
            work.wait()
        loss, stop, save = message.tolist()
        return StepSummary(loss=loss, samples=samples, stop=stop > 0, save=save > 0)


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGINT or SIGTERM has arrived or the launcher has died."""
    asked = False
    # A forked rank's parent is the fork server, which outlives the launcher.
    parent, launcher = os.getppid(), multiprocessing.parent_process()

    def remember(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    previous = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked or os.getppid() != parent or (launcher is not None and not launcher.is_alive())
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
