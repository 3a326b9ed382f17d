"""Experts whose matrices are the slices of one parameter ``[experts, outputs, inputs]``, as in transformers.

No hook sees a use of a slice. In steps with statistics the module's forward runs with a ``linear`` that reports the
slice, its inputs and its outputs: the forward that the class defines, not a fused one that a decorator puts before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from typing_extensions import override

from natgrad.layers.base import Layer
from natgrad.layers.hidden import HiddenLayer, ObservedForward, rebound


def has_experts(module: nn.Module) -> bool:
    """Return whether all parameters of a module have three dimensions, and its forward calls ``linear`` with them."""
    parameters, replaced = module._parameters, vars(module).get("forward")
    if not parameters or not (replaced is None or isinstance(replaced, ObservedForward)):
        return False
    if any(p is None or is_lazy(p) or p.ndim != 3 or not p.is_contiguous() for p in parameters.values()):
        return False
    forward = _undecorated(type(module))
    return forward is not None and {"linear", *parameters} <= {*forward.__code__.co_names}


def _undecorated(kind: type[nn.Module]) -> FunctionType | None:
    """Return the forward that a class defines below the decorators of transformers. None: there are others."""
    forward: Any = kind.forward
    while hasattr(forward, "__wrapped__"):
        if not getattr(forward, "__globals__", {}).get("__name__", "").startswith("transformers."):
            return None
        forward = forward.__wrapped__
    return forward if isinstance(forward, FunctionType) else None


def expert_layers(name: str, module: nn.Module) -> Sequence[Layer] | str:
    """Return a layer for each slice of each trained parameter."""
    trained = {leaf: p for leaf, p in module._parameters.items() if p is not None and p.requires_grad}
    layers = [ExpertLayer(name, module, leaf, index) for leaf, p in trained.items() for index in range(len(p))]
    return layers or "frozen"


class ExpertLayer(HiddenLayer):
    """One slice of a parameter: the matrix of one expert."""

    def __init__(self, name: str, module: nn.Module, leaf: str, index: int) -> None:
        super().__init__(name, module, f"{leaf}.{index}", {leaf: slice(index, index + 1), "": None})

    @override
    def block_sizes(self, weight: Tensor) -> tuple[int, int, int]:
        return 1, weight.shape[1], weight.shape[2]


class ExpertsForward(ObservedForward):
    """The forward that the class defines, below its decorators, with a ``linear`` that reports the slices."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        forward = _undecorated(type(module))
        assert forward is not None
        functional = SimpleNamespace(**{**vars(F), "linear": self._linear})
        layers = SimpleNamespace(**{**vars(nn), "functional": functional})
        known = {
            F.linear: self._linear,
            F: functional,
            nn: layers,
            torch: SimpleNamespace(**{**vars(torch), "nn": layers}),
        }
        names = {name: known[value] for name, value in forward.__globals__.items() if _is_one_of(value, known)}
        self._run = rebound(forward, **names)

    @override
    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._run(module, *args, **kwargs)

    def _linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = F.linear(inputs, weight, bias)
        module = self._module()
        assert module is not None
        for leaf, parameter in module._parameters.items():
            if parameter is None or weight._base is not parameter:
                continue
            if (weight.shape, weight.stride()) == (parameter.shape[1:], parameter.stride()[1:]):
                begin = weight.storage_offset() - parameter.storage_offset()
                self.report(f"{leaf}.{begin // weight.numel()}", inputs, output)
        return output


def _is_one_of(value: Any, known: dict[Any, Any]) -> bool:
    return any(value is one for one in known)


ExpertLayer.observed_forward = ExpertsForward
