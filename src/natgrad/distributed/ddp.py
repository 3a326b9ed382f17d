"""``DistributedDataParallel`` around a model, and its communication hook."""

# Annotations are not strings, because DDP compares those of its hook with types.

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

Listener = Callable[[GradBucket], None]


def find_replica(model: nn.Module) -> DistributedDataParallel | None:
    """Return the ``DistributedDataParallel`` around the user's module, also inside ``torch.compile``, or None."""
    while not isinstance(model, DistributedDataParallel):
        inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return None
        model = inner
    return model


class Relay:
    """natgrad's communication hook of one ``DistributedDataParallel``. Copies average, and report to nobody.

    Attributes:
        averages_elsewhere: Those that average the gradients themselves; while there are any, DDP does not.
        listener: A method that is called with each bucket that DDP has started to reduce.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Average over a process group."""
        self._group = group
        self.averages_elsewhere: weakref.WeakSet[object] = weakref.WeakSet()
        self.listener: weakref.WeakMethod[Listener] | None = None

    def __reduce__(self) -> tuple[type["Relay"], tuple[None]]:
        return Relay, (None,)

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket, or leave it to others."""
        if len(self.averages_elsewhere):
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future
        future = allreduce_hook(self._group, bucket)  # type: ignore[arg-type]  # None: all ranks
        listener = None if self.listener is None else self.listener()
        if listener is not None:
            listener(bucket)
        return future


_relays: weakref.WeakKeyDictionary[nn.Module, Relay] = weakref.WeakKeyDictionary()


def relay_of(replica: DistributedDataParallel) -> Relay:
    """Return the relay of a wrapper, after registering it if it has none.

    Raises:
        RuntimeError: if the wrapper has a communication hook of another kind.
    """
    if replica not in _relays:
        relay = Relay(replica.process_group)
        replica.register_comm_hook(relay, _reduce)
        _relays[replica] = relay
    return _relays[replica]


def stop_averaging(model: nn.Module, averager: object) -> bool:
    """Leave the averaging of a model's gradients to the `averager`; return False if the wrapper has another hook."""
    replica = find_replica(model)
    if replica is not None:
        try:
            relay_of(replica).averages_elsewhere.add(averager)
        except RuntimeError:
            return False
    return True


def resume_averaging(model: nn.Module, averager: object) -> None:
    """Undo `stop_averaging`, from the next pass on."""
    relay = _known(model)
    if relay is not None:
        relay.averages_elsewhere.discard(averager)


def averages(model: nn.Module) -> bool:
    """Return whether the wrapper of a model, if it has one, averages gradients."""
    relay = _known(model)
    return relay is None or not len(relay.averages_elsewhere)


def _known(model: nn.Module) -> Relay | None:
    replica = find_replica(model)
    return None if replica is None else _relays.get(replica)


def _reduce(relay: Relay, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return relay.reduce(bucket)
