"""Linear maps inside a module's forward, which no hook can observe, and a forward that reports them to observers."""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from natgrad.layers.base import CallObserver, Handle, qualified
from natgrad.layers.linear import LinearLayer
from natgrad.layers.rows import Rows


class HiddenLayer(LinearLayer):
    """A weight and a bias, or parts of them, that a module's forward uses for one of its linear maps.

    Attributes:
        part: The name of the linear map within the module.
    """

    observed_forward: ClassVar[type[ObservedForward]]

    def __init__(self, name: str, module: nn.Module, part: str, leaves: dict[str, slice | None]) -> None:
        """Read the sizes of a `part` from the rows of weight and bias in `leaves`; None stands for all rows."""
        self.part, self._owner, self._leaves = part, name, leaves
        self.weight_name, self.bias_name = leaves
        super().__init__(qualified(name, part), module)

    @override
    def lay_out(self) -> None:
        super().lay_out()
        slots, self.slots = self.slots, []
        for slot in slots:
            name, rows = qualified(self._owner, slot.leaf), self._leaves[slot.leaf]
            self.slots.append(replace(slot, name=name, rows=rows, part=self.part if rows else ""))

    @override
    def block_sizes(self, weight: Tensor) -> tuple[int, int, int]:
        rows = self._leaves[self.weight_name]
        return 1, len(weight if rows is None else weight[rows]), weight.shape[1]

    @override
    def observe_calls(self, observer: CallObserver) -> list[Handle]:
        return [self.observed_forward.add_observer(self.module, self.part, observer)]

    def rows(self, inputs: Tensor, gradients: Tensor, samples: int) -> tuple[Rows, Rows]:
        """Return the rows, giving the gradients the leading dimensions of the inputs."""
        return super().rows(inputs, gradients.reshape(*inputs.shape[:-1], gradients.shape[-1]), samples)


class ObservedForward(ABC):
    """Computes the same as the forward of a module, and reports the uses of the linear maps within to observers.

    It is the module's ``forward`` attribute while there are observers. Copies and pickles of the module have the
    forward of the class.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._observers: dict[str, list[CallObserver]] = {}
        # Attributes that ``torch.export`` reads from a forward: those of the method of the class.
        forward = type(module).forward
        self.__name__, self.__code__, self.__globals__ = forward.__name__, forward.__code__, forward.__globals__
        signature = inspect.signature(forward)
        self.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])

    @classmethod
    def add_observer(cls, module: nn.Module, part: str, observer: CallObserver) -> Handle:
        """Call ``observer.observe`` at each use of a part of `module`."""
        forward = module.__dict__.get("forward")
        if not isinstance(forward, cls):
            forward = cls(module)
            module.forward = forward
        forward._observers.setdefault(part, []).append(observer)
        return _ObserverHandle(forward, part, observer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module, or of its class if no observer takes uses or gradients are not recorded."""
        module = self._module()
        assert module is not None
        observers = (observer for observers in self._observers.values() for observer in observers)
        if not torch.is_grad_enabled() or not any(observer.is_observing for observer in observers):
            return type(module).forward(module, *args, **kwargs)
        return self.run(module, *args, **kwargs)

    @abstractmethod
    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute the same as the module's forward, calling `report` for every part."""

    def report(self, part: str, inputs: Tensor, output: Tensor) -> None:
        """Report one use of a part."""
        for observer in self._observers.get(part, ()):
            observer.observe(inputs, output)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the forward of the module's class."""
        return getattr, (self._module(), "forward")


@dataclass
class _ObserverHandle:
    forward: ObservedForward
    part: str
    observer: CallObserver

    def remove(self) -> None:
        """Remove the observer; after the last one restore the module's forward."""
        observers, module = self.forward._observers, self.forward._module()
        observers[self.part].remove(self.observer)
        if module is not None and not any(observers.values()) and module.__dict__.get("forward") is self.forward:
            del module.forward


def unknown_forward(module: nn.Module, base: type[nn.Module], used: Mapping[Any, Sequence[str]]) -> str:
    """Return why an `ObservedForward` for `base` cannot replace the forward of `module`; empty if it can.

    `used` holds the functions that will be `rebound`, and the global names that they must look up.
    """
    forward, name = module.__dict__.get("forward"), type(module).__name__
    if type(module).forward is not base.forward:
        return f"{name} has a forward of its own, which hides its projections"
    method = getattr(forward, "__func__", None)
    if forward is not None and not isinstance(forward, ObservedForward) and method is not base.forward:
        return "its forward was replaced by one that hides its projections"
    if not all(set(names) <= _names(function) for function, names in used.items()):
        return f"this version of torch computes {name} in a way that hides its projections"
    return ""


def _names(function: object) -> set[str]:
    return set(getattr(getattr(function, "__code__", None), "co_names", ()))


def rebound(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return a copy of `function` with some of its global names bound to other objects."""
    original = cast("FunctionType", function)
    # Without "__name__" torch.compile looks the names up in this scope rather than in the module of that name.
    scope = {name: value for name, value in original.__globals__.items() if name != "__name__"} | names
    copy = FunctionType(original.__code__, scope, original.__name__, original.__defaults__, original.__closure__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy
