"""Recognise modules by what they compute: subclasses with another forward, and layers of other libraries.

A copy of the module is called once in training and once in evaluation mode, on the CPU, with random numbers in place
of parameters and inputs, and its outputs are compared with those of torch's class. Neither hooks nor parameters,
buffers and random numbers of the training are touched.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_MATRICES = (nn.Linear, nn.Embedding, *_CONVOLUTIONS)
# Norms with channels in the second dimension, and the dimensions of their inputs.
_CHANNEL_NORMS: dict[type[nn.Module] | None, int] = {
    nn.GroupNorm: 4,
    nn.BatchNorm1d: 3,
    nn.BatchNorm2d: 4,
    nn.BatchNorm3d: 5,
    nn.InstanceNorm1d: 3,
    nn.InstanceNorm2d: 4,
    nn.InstanceNorm3d: 5,
}
_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}

_ROWS = 64
"""The rows of tables and linear layers that are compared."""

_TOLERANCE = 1e-4
"""The largest difference between outputs, relative to the largest output."""


@dataclass(frozen=True)
class Form:
    """What a module computes.

    Attributes:
        base: The class in torch that does so.
        eps: ε of a layer or RMS norm. None: that of the dtype.
        channels_first: Whether the channels of a layer or RMS norm are the second dimension, not the last.
        is_followed: Whether the module applies its submodules to the result of a norm, such as an activation.
    """

    base: type[nn.Module]
    eps: float | None = None
    channels_first: bool = False
    is_followed: bool = False


_KNOWN: weakref.WeakKeyDictionary[nn.Module, tuple[type[nn.Module], Form | None]] = weakref.WeakKeyDictionary()


def form_of(module: nn.Module, base: type[nn.Module] | None) -> Form | None:
    """Return what a module derived from `base`, a class in torch, or from none computes. None: something else."""
    kind, form = _KNOWN.get(module, (None, None))
    if kind is not type(module):
        form = next((form for form in _candidates(module, base) if _agrees(module, form)), None)
        _KNOWN[module] = type(module), form
    return form


def has_one_weight(module: nn.Module) -> bool:
    """Return whether the parameters are a vector or matrix "weight" and perhaps a "bias" for each of its rows."""
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    if weight is None or is_lazy(weight) or module._parameters.keys() - {"weight", "bias"}:
        return False
    return weight.ndim in (1, 2) and (bias is None or bias.shape == weight.shape[:1])


def _candidates(module: nn.Module, base: type[nn.Module] | None) -> Iterator[Form]:
    """Yield the forms that a module may have, by its parameters, buffers and attributes."""
    weight = module._parameters.get("weight")
    if _arguments(type(module)) > (1 if base is None else _arguments(base)):
        return  # such as a gate
    children = [child for child in module._modules.values() if child is not None]
    buffers = module._buffers.keys() - (_STATISTICS if base in _CHANNEL_NORMS else set())
    if weight is None or buffers or any([*child.parameters(), *child.buffers()] for child in children):
        return
    if module._parameters.keys() - {"weight", "bias"} or (base is None and not has_one_weight(module)):
        return
    if base in _MATRICES or (base is None and weight.ndim == 2):
        if not children:
            yield Form(base or nn.Linear)
    elif base is not None and base in _CHANNEL_NORMS:
        yield Form(base, is_followed=bool(children))
    elif base in (nn.LayerNorm, nn.RMSNorm, None) and weight.numel() > 1:
        numbers = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1}
        for eps in sorted(numbers) if base is None else [vars(module).get("eps")]:
            for kind in (nn.RMSNorm, nn.LayerNorm) if base is None else (base,):
                yield Form(kind, eps, channels_first=False, is_followed=bool(children))
                yield Form(kind, eps, channels_first=True, is_followed=bool(children))


def _arguments(kind: type[nn.Module]) -> int:
    """Return how many arguments a class's forward takes, besides the module."""
    return len(inspect.signature(kind.forward).parameters) - 1


@torch.no_grad()
def _agrees(module: nn.Module, form: Form) -> bool:
    """Return whether a module computes what its form says, in both modes."""
    # The forward is the user's code, which may fail for any reason on these inputs.
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            return all(_agrees_in_mode(module, form, training=training) for training in (True, False))
    except Exception:
        return False


def _agrees_in_mode(module: nn.Module, form: Form, *, training: bool) -> bool:
    numbers = torch.Generator().manual_seed(0)
    parameters = {
        name: None if parameter is None else _random(_shape(parameter, form), numbers)
        for name, parameter in module._parameters.items()
    }
    inputs = _inputs(module, form, numbers)
    outputs = _call(module, type(module), parameters, inputs, training=training)
    if form.base in _MATRICES:
        return _equal(outputs, _call(module, form.base, parameters, inputs, training=training))
    weight, bias = parameters["weight"], parameters.get("bias")
    assert weight is not None
    shape = (-1,) + (1,) * (inputs.ndim - 2) if form.channels_first or form.base in _CHANNEL_NORMS else weight.shape
    expected = _normalised(module, form, inputs, training=training) * weight.view(shape)
    if bias is not None:
        expected = expected + bias.view(shape)
    if form.is_followed:
        for child in _copies(module, training=training).values():
            expected = expected if child is None else child(expected)
        return _equal(outputs, expected)
    # Coefficients may be stored as their differences from 1.
    zeros = {name: None if value is None else torch.zeros_like(value) for name, value in parameters.items()}
    return _equal(outputs - _call(module, type(module), zeros, inputs, training=training), expected)


def _shape(parameter: Tensor, form: Form) -> torch.Size:
    """Return the shape of a parameter, with fewer rows if it is that of a large table or linear layer."""
    rows = _ROWS if form.base in (nn.Linear, nn.Embedding) else len(parameter)
    return torch.Size((min(len(parameter), rows), *parameter.shape[1:]))


def _equal(outputs: Tensor, expected: Tensor) -> bool:
    largest = float(expected.abs().max())
    return outputs.shape == expected.shape and float((outputs - expected).abs().max()) <= _TOLERANCE * largest


def _call(
    module: nn.Module, kind: type[nn.Module], parameters: Mapping[str, Tensor | None], inputs: Tensor, *, training: bool
) -> Tensor:
    """Return the outputs of the forward of `kind` with the attributes of `module`, but with other parameters."""
    twin = object.__new__(kind)
    numbers = torch.Generator().manual_seed(1)
    buffers = {
        name: None if buffer is None else torch.rand(buffer.shape, generator=numbers, dtype=torch.float32) + 0.5
        for name, buffer in module._buffers.items()
    }
    twin.__dict__ = {
        **vars(module),
        "_parameters": {"bias": None, **parameters},
        "_buffers": buffers,
        "_modules": _copies(module, training=training),
        "training": training,
    }
    twin.__dict__.pop("forward", None)  # a wrapper's
    outputs = kind.forward(twin, inputs.clone())
    return outputs if isinstance(outputs, Tensor) else torch.empty(0)


def _copies(module: nn.Module, *, training: bool) -> dict[str, nn.Module | None]:
    """Return copies of the submodules in one mode, without hooks."""
    copies = {name: deepcopy(child) for name, child in module._modules.items()}
    for inner in (inner for child in copies.values() if child is not None for inner in child.modules()):
        inner.training = training
        inner._forward_hooks.clear()
        inner._forward_pre_hooks.clear()
    return copies


def _random(shape: torch.Size, numbers: torch.Generator) -> Tensor:
    """Return random numbers."""
    return torch.randn(shape, generator=numbers, dtype=torch.float32)


def _inputs(module: Any, form: Form, numbers: torch.Generator) -> Tensor:
    """Return inputs of two samples; those of norms are so small that ε matters, with a mean."""
    weight = module._parameters["weight"]
    if form.base is nn.Linear:
        return torch.randn(2, 3, weight.shape[1], generator=numbers, dtype=torch.float32)
    if form.base is nn.Embedding:
        return torch.arange(6).remainder(min(len(weight), _ROWS)).view(2, 3)
    if form.base in _CONVOLUTIONS:
        # Just more than two positions, so that paddings that depend on the size differ.
        sizes = [
            d * (k - 1) + s + 2 for d, k, s in zip(module.dilation, module.kernel_size, module.stride, strict=True)
        ]
        return torch.randn(2, module.in_channels, *sizes, generator=numbers, dtype=torch.float32)
    if form.base in _CHANNEL_NORMS:
        shape = (2, len(weight), *(3,) * (_CHANNEL_NORMS[form.base] - 2))
        scale = float(module.eps) ** 0.5
    else:
        shape = (2, len(weight), 3, 3) if form.channels_first else (2, 3, *weight.shape)
        scale = (form.eps or 1e-6) ** 0.5
    return (torch.randn(shape, generator=numbers, dtype=torch.float32) + 0.5).mul_(scale)


def _normalised(module: nn.Module, form: Form, inputs: Tensor, *, training: bool) -> Tensor:
    """Return the inputs normalised as the form says."""
    if form.base in _CHANNEL_NORMS:
        none = {"weight": None, "bias": None}
        return _call(module, form.base, none, inputs, training=training)
    weight = module._parameters["weight"]
    assert weight is not None
    rows, shape = inputs.movedim(1, -1) if form.channels_first else inputs, list(weight.shape)
    if form.base is nn.LayerNorm:
        assert form.eps is not None
        rows = F.layer_norm(rows, shape, eps=form.eps)
    else:
        rows = F.rms_norm(rows, shape, eps=form.eps)
    return rows.movedim(-1, 1) if form.channels_first else rows
