"""Where tests put their tensors: on the CPU, or on the accelerator that ``pytest --device cuda`` names."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils import checkpoint
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map_only

import natgrad

VARIABLE = "NATGRAD_TEST_DEVICE"  # by which ranks and programs that tests start know
# Who says where its tensors belong, or makes some in threads that know nothing of `On`.
_THEIRS = (str(Path(natgrad.__file__).parent), str(Path(checkpoint.__file__)))
_FILL = {getattr(torch.Tensor, name) for name in ("bernoulli_", "exponential_", "normal_", "random_", "uniform_")}


class On(TorchFunctionMode):
    """Makes tensors on a device where nothing is said, but for the library's own; with the random numbers of a CPU."""

    def __init__(self, device: str):
        super().__init__()
        self.device = torch.device(device)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if sys._getframe(1).f_code.co_filename.startswith(_THEIRS):
            return function(*args, **kwargs)
        if function in _FILL or getattr(function, "__module__", None) == "torch.nn.init":
            tensor, *rest = args or [kwargs.pop("tensor")]
            with torch.no_grad():
                return tensor.copy_(function(tensor.cpu(), *rest, **kwargs))
        if function not in _device_constructors() or kwargs.get("device") is not None:
            return function(*args, **kwargs)
        generator = kwargs.get("generator")
        if "rand" in function.__name__ and (generator is None or generator.device.type != self.device.type):
            return function(*args, **kwargs).to(self.device)
        return function(*args, **{**kwargs, "device": self.device})


def name() -> str:
    """The device of this run of the tests."""
    return os.environ.get(VARIABLE, "cpu")


def chosen() -> AbstractContextManager[object]:
    """Have tensors made there meanwhile."""
    return nullcontext() if name() == "cpu" else On(name())


@contextmanager
def as_torch_does() -> Iterator[None]:
    """Have torch alone make tensors there, by its default device, of which the library learns nothing either."""
    if name() == "cpu":
        yield
        return
    with _pop_mode_temporarily(), torch.device(name()):
        yield


@contextmanager
def untold() -> Iterator[None]:
    """Have tensors made where nothing is said of this run's device."""
    with nullcontext() if name() == "cpu" else _pop_mode_temporarily():
        yield


def generator(seed: int) -> torch.Generator:
    """A generator for functions of the library that are called with tensors of this run."""
    return torch.Generator(name()).manual_seed(seed)


def here(tree: Any) -> Any:
    """Bring the tensors of a state, which are on the CPU, to those of this run."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(name()), tree)
