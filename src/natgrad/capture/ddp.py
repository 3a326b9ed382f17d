"""Call a listener with each bucket of gradients that ``DistributedDataParallel`` begins to reduce."""
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


class _Relay:
    """The state of the communication hook: the process group and the listener. Copies have no group and listener."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.listener: weakref.WeakMethod[Listener] | None = None

    def __reduce__(self) -> tuple[type["_Relay"], tuple[None]]:
        return _Relay, (None,)


_relays: weakref.WeakKeyDictionary[nn.Module, _Relay] = weakref.WeakKeyDictionary()


def listen(model: nn.Module, listener: Listener) -> None:
    """Call `listener`, a bound method that is held weakly, with each bucket that DDP has started to reduce.

    It replaces an earlier listener. Does nothing if `model` is not wrapped in DDP or has another communication hook.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if not isinstance(model, DistributedDataParallel):
        return
    if model not in _relays:
        relay = _Relay(model.process_group)
        try:
            model.register_comm_hook(relay, _reduce)
        except RuntimeError:  # there is a hook already
            return
        _relays[model] = relay
    _relays[model].listener = weakref.WeakMethod(listener)


def _reduce(relay: _Relay, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = allreduce_hook(relay.group, bucket)  # type: ignore[arg-type]  # None: all ranks
    listener = None if relay.listener is None else relay.listener()
    if listener is not None:
        listener(bucket)
    return future
