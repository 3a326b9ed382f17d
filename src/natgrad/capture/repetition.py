"""Repeat the passes of a batch with the same random numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from natgrad.capture.model_hooks import ForwardPass
from natgrad.linalg.device import accelerators

# The largest number of recorded passes; there may be passes without a following step.
_MOST = 1024


class RandomState:
    """The state of torch's default generators on the host and some accelerators."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """Read the current state."""
        self._host = torch.get_rng_state()
        self._others = [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]

    def restore(self) -> None:
        """Restore the state."""
        torch.set_rng_state(self._host)
        for device, state in self._others:
            torch.get_device_module(device).set_rng_state(state, device)


class Recording:
    """Records forward passes with gradients, and the random state at their beginning."""

    def __init__(self, model: nn.Module) -> None:
        """Start without passes."""
        self._devices = accelerators(model)
        self._passes: deque[ForwardPass] = deque(maxlen=_MOST)

    def begin(self, forward: ForwardPass) -> None:
        """Record a pass that begins."""
        forward.random_state = RandomState(self._devices)
        self._passes.append(forward)

    def of(self, tasks: Iterable[int]) -> list[ForwardPass]:
        """Return the passes differentiated by the backward passes `tasks`."""
        known = set(tasks)
        return [forward for forward in self._passes if forward.first in known]


class Repetition:
    """Repeats recorded forward passes, one after the other.

    Attributes:
        passes: The passes so far.
    """

    def __init__(self, recorded: Sequence[ForwardPass]) -> None:
        """Repeat the passes `recorded`."""
        self._recorded = recorded
        self.passes: list[ForwardPass] = []

    def begin(self, forward: ForwardPass) -> None:
        """Begin a pass with its own terms, because one backward pass goes through all of them."""
        forward.first = -2 - len(self.passes)  # not the number of a backward pass
        if len(self.passes) < len(self._recorded):
            recorded = self._recorded[len(self.passes)].random_state
            assert recorded is not None
            recorded.restore()
        self.passes.append(forward)


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore all state that passes change, including torch's generators, and send nothing to other ranks."""
    with restored_random_state(model), restored(model), _unsynchronised(model):
        yield


@contextmanager
def restored_random_state(model: nn.Module) -> Iterator[None]:
    """Restore torch's default generators, on the host and where the model is, at the end."""
    random_state = RandomState(accelerators(model))
    try:
        yield
    finally:
        random_state.restore()


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Clear the gradients, and restore gradients, buffers and training modes at the end."""
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    values = [
        (buffer, buffer.clone()) for _, named in buffers for buffer in named.values() if isinstance(buffer, Tensor)
    ]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for module, named in buffers:
                module._buffers.update(named)
            for buffer, before in values:
                buffer.copy_(before)


@contextmanager
def _unsynchronised(model: nn.Module) -> Iterator[None]:
    """Keep ``DistributedDataParallel`` from sending anything, including buffers."""
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    flags = [(wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync) for wrapper in wrappers]
    for wrapper in wrappers:
        _settle_buckets(wrapper)
        wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False
    try:
        yield
    finally:
        for wrapper, (backward, forward) in zip(wrappers, flags, strict=True):
            wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = backward, forward


def _settle_buckets(wrapper: DistributedDataParallel) -> None:
    """Make ``DistributedDataParallel`` rebuild its buckets now, not in its next forward pass; collective.

    DDP does so once, after the first backward pass. If a closure raised on one rank before its forward pass, the other
    ranks would wait.
    """
    if wrapper.reducer._rebuild_buckets():
        wrapper._has_rebuilt_buckets = True
