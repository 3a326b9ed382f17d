"""The same batch again: passes that are recorded, and repeated with the random numbers that they began with."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from natgrad.capture.model_hooks import Pass

# Passes without a step after them, of an evaluation with gradients say, are not kept for ever.
_MOST = 1024


class Chance:
    """The state of torch's own generators."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """Read the host's, and those of some accelerators."""
        self._host = torch.get_rng_state()
        self._others = [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self._host)
        for device, state in self._others:
            torch.get_device_module(device).set_rng_state(state, device)


class Recording:
    """Forward passes with gradients, and the random numbers that they began with."""

    def __init__(self, model: nn.Module) -> None:
        """Begin with none, of a model on these devices."""
        self._devices = accelerators(model)
        self._passes: deque[tuple[Pass, Chance]] = deque(maxlen=_MOST)

    def enter(self, forward: Pass) -> None:
        """Note that a pass begins."""
        self._passes.append((forward, Chance(self._devices)))

    def of(self, tasks: Iterable[int]) -> list[tuple[Pass, Chance]]:
        """Return the passes that were differentiated in some backward passes."""
        known = set(tasks)
        return [(forward, chance) for forward, chance in self._passes if forward.first in known]


class Repetition:
    """Forward passes that repeat recorded ones, one after the other.

    Attributes:
        passes: Those so far.
    """

    def __init__(self, recorded: Sequence[tuple[Pass, Chance]]) -> None:
        """Repeat those `recorded`."""
        self._recorded = recorded
        self.passes: list[Pass] = []

    def enter(self, forward: Pass) -> None:
        """Note that a pass begins, whose terms are to be its own: one backward pass goes through all of them."""
        forward.first = -2 - len(self.passes)  # no number of a backward pass
        if len(self.passes) < len(self._recorded):
            self._recorded[len(self.passes)][1].restore()
        self.passes.append(forward)


@contextmanager
def as_found(model: nn.Module) -> Iterator[None]:
    """Leave all that passes change as it was found, torch's generators too, and average nothing over ranks."""
    chance = Chance(accelerators(model))
    try:
        with restored(model), _unsynchronised(model):
            yield
    finally:
        chance.restore()


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Begin without gradients, and leave gradients, buffers and training modes as they were found."""
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    values = [(own, own.clone()) for _, named in buffers for own in named.values() if isinstance(own, Tensor)]
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
            for own, before in values:
                own.copy_(before)


@contextmanager
def _unsynchronised(model: nn.Module) -> Iterator[None]:
    """Have DistributedDataParallel send nothing, not even buffers, as its ``no_sync`` does."""
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    flags = [(one.require_backward_grad_sync, one.require_forward_param_sync) for one in wrappers]
    for wrapper in wrappers:
        _settle_buckets(wrapper)
        wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False
    try:
        yield
    finally:
        for wrapper, (backward, forward) in zip(wrappers, flags, strict=True):
            wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = backward, forward


def _settle_buckets(wrapper: DistributedDataParallel) -> None:
    """Have DistributedDataParallel agree on its buckets now, in place of in its next forward pass; collective.

    It does so once, after the first backward pass. A closure that raises in front of its forward pass on one rank would
    leave the others waiting in there.
    """
    if wrapper.reducer._rebuild_buckets():
        wrapper._has_rebuilt_buckets = True


def accelerators(model: nn.Module) -> list[torch.device]:
    """Return the devices of a model's parameters beside the host, whose generators its layers draw from."""
    return sorted({p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}, key=str)
