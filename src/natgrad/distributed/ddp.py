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
    """natgrad's communication hook of one ``DistributedDataParallel``. Copies average, and have no listener.

    Attributes:
        averagers: What averages the gradients in place of DDP, which does it only while there are none.
        listener: A method that is called with each bucket that DDP has started to reduce.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Average over a process group."""
        self._group = group
        self.averagers: weakref.WeakSet[object] = weakref.WeakSet()
        self.listener: weakref.WeakMethod[Listener] | None = None

    def __reduce__(self) -> tuple[type["Relay"], tuple[None]]:
        return Relay, (None,)

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket, unless another averages its gradients."""
        if len(self.averagers):
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future
        future = allreduce_hook(self._group, bucket)  # type: ignore[arg-type]  # None: all ranks
        listener = None if self.listener is None else self.listener()
        if listener is not None:
            listener(bucket)
        return future


_relays: weakref.WeakKeyDictionary[nn.Module, Relay] = weakref.WeakKeyDictionary()


def relay_of(model: nn.Module) -> Relay | None:
    """Return the relay of a model's wrapper, after registering it if there is none. None: there is no wrapper.

    Raises:
        RuntimeError: if the wrapper has a communication hook of another kind.
    """
    replica = find_replica(model)
    if replica is None:
        return None
    if replica not in _relays:
        relay = Relay(replica.process_group)
        replica.register_comm_hook(relay, Relay.reduce)
        _relays[replica] = relay
    return _relays[replica]


def averagers_of(model: nn.Module) -> weakref.WeakSet[object]:
    """Return what averages the gradients of a model in place of its wrapper."""
    replica = find_replica(model)
    relay = None if replica is None else _relays.get(replica)
    return weakref.WeakSet() if relay is None else relay.averagers
