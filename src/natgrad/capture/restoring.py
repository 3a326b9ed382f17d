"""Restore what passes over a model change: random states, gradients, buffers and training modes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from natgrad.linalg.device import accelerators


class RandomState:
    """The state of torch's default generators on the host and some accelerators."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._host = torch.get_rng_state()
        self._others = [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]

    def restore(self) -> None:
        """Restore the state."""
        torch.set_rng_state(self._host)
        for device, state in self._others:
            torch.get_device_module(device).set_rng_state(state, device)


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
