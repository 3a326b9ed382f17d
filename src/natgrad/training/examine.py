"""What natgrad does with a user's own model: its coverage, memory and time, from a few steps with random inputs."""

from __future__ import annotations

import copy
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._pytree import tree_leaves

from natgrad import PreconditionedOptimizer, create_optimizer
from natgrad.errors import ArgumentError, NatgradWarning, did_you_mean, require
from natgrad.preconditioner.explanation import Explanation

from .curvatures import options_named

# Steps of which the first refreshes the curvature and the last does not, also with natural Muon's intervals.
_STEPS = 4
_INPUT = "[NAME=]SIZES[:DTYPE], as 8,3,224,224 or tokens=4,128:long"


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What natgrad does with a model.

    Attributes:
        explanation: Which parameters are preconditioned, and why others are not.
        warnings: natgrad's warnings.
        bytes: The memory by what holds it.
        passes: Seconds of a forward and a backward pass without natgrad.
        step: Seconds of both and of a step that refreshes nothing.
        refresh: Seconds of both and of a step that refreshes.
    """

    explanation: Explanation
    warnings: list[str]
    bytes: dict[str, int]
    passes: float
    step: float
    refresh: float


def examine(
    model: nn.Module,
    inputs: Sequence[str],
    optimizer: str,
    options: Mapping[str, Any],
    *,
    device: torch.device,
    full: bool = False,
) -> Examination:
    """Build an optimizer of a model and take steps with the mean square of the outputs as the loss.

    Args:
        model: The model, whose parameters change.
        inputs: The arguments of the model as text.
        optimizer: The name of an optimizer for `natgrad.create_optimizer`.
        options: Its options.
        device: The device.
        full: Whether the explanation lists every parameter.

    Raises:
        ValueError: An option is not allowed, or the model does not take such inputs.
    """
    model = model.to(device).train()
    arguments = [_draw(text, model, device) for text in inputs]
    if any(isinstance(module, LazyModuleMixin) for module in model.modules()):
        _pass(model, arguments, inputs)  # which makes the parameters of lazy modules
    plain = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", NatgradWarning)
        created = _optimizer(model, optimizer, options)
        _pass(plain, arguments, inputs)  # the first is slower than others
        passes = min(_seconds(lambda: _pass(plain, arguments, inputs), device) for _ in range(_STEPS))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step, refresh = _steps(created, lambda: _pass(model, arguments, inputs), device)
    held = created.state.values()
    size = {
        "parameters": _bytes(model.parameters()),
        "gradients": _bytes(each.grad for each in model.parameters()),
        "optimizer": _bytes(value for state in held for value in state.values()),
        "curvature": sum(row.bytes for row in created.explain().rows),
    }
    if device.type == "cuda":
        size["peak on the GPU"] = torch.cuda.max_memory_allocated()
    messages = list(dict.fromkeys(str(each.message) for each in caught))
    explanation = created.explain(full=full)
    return Examination(
        explanation=explanation, warnings=messages, bytes=size, passes=passes, step=step, refresh=refresh
    )


def _optimizer(model: nn.Module, name: str, options: Mapping[str, Any]) -> PreconditionedOptimizer:
    try:
        with options_named("option", options):
            return create_optimizer(model, name, **options)
    except ArgumentError as error:
        if error.name != "name":
            raise
        raise error.renamed("optimizer") from error


def load_model(path: str, options: Mapping[str, Any]) -> nn.Module:
    """Return the model that a function builds.

    Args:
        path: PACKAGE.MODULE:FUNCTION; the module may be in the current folder. FUNCTION may be a class or a model too.
        options: The function's arguments.

    Raises:
        ValueError: There is no such module or function, or it returns no model.
    """
    module, colon, names = path.partition(":")
    require(colon and module and names, "model", path, "PACKAGE.MODULE:FUNCTION, as torchvision.models:resnet50")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module)
    except ImportError as error:
        raise ArgumentError("model", path, f"in a module that Python can import from this folder: {error}") from error
    for name in names.split("."):
        require(hasattr(found, name), "model", path, f"a name of {module}", did_you_mean(name, dir(found)))
        found = getattr(found, name)
    if not isinstance(found, nn.Module):
        try:
            found = found(**options)
        except TypeError as error:
            raise ArgumentError("model", path, f"a function of the arguments in --set: {error}") from error
    fits = isinstance(found, nn.Module)
    require(fits, "model", path, f"a function that returns an nn.Module, not {type(found).__name__}")
    model: nn.Module = found
    return model


def _draw(text: str, model: nn.Module, device: torch.device) -> tuple[str, Tensor]:
    """Return the name of an argument of a model, empty for one by position, and random values of it."""
    name, equals, form = text.rpartition("=")
    sizes, _, kind = form.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    fits = all(size.strip().isdecimal() and int(size) > 0 for size in sizes.split(","))
    fits = fits and isinstance(dtype, torch.dtype) and (not equals or name.isidentifier())
    require(fits, "input", text, _INPUT)
    assert dtype is not None
    shape = [int(size) for size in sizes.split(",")]
    if dtype.is_floating_point:
        return name, torch.randn(shape, dtype=dtype, device=device)
    if dtype == torch.bool:
        return name, torch.ones(shape, dtype=dtype, device=device)
    rows = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)]
    return name, torch.randint(min(rows, default=2), shape, dtype=dtype, device=device)


def _pass(model: nn.Module, arguments: Sequence[tuple[str, Tensor]], given: Sequence[str]) -> None:
    """Run a model forward and backward."""
    model.zero_grad()
    named = {name: value for name, value in arguments if name}
    try:
        outputs = model(*(value for name, value in arguments if not name), **named)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # of the user's model
        allowed = "what the model takes, with random values; wrap a model that needs others, such as lengths"
        allowed = f"{allowed} ({type(error).__name__}: {error})"
        raise ArgumentError("input", " ".join(given), allowed) from error
    found = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    losses = [leaf.float().square().mean() for leaf in found]
    require(losses, "model", type(model).__name__, "one with outputs that have a gradient")
    sum(losses[1:], losses[0]).backward()


def _steps(
    optimizer: PreconditionedOptimizer, run_passes: Callable[[], None], device: torch.device
) -> tuple[float, float]:
    """Return the least seconds of a step without and with a refresh."""

    def step() -> None:
        run_passes()
        optimizer.step()

    least = [inf, inf]
    for _ in range(_STEPS):
        before = optimizer.metrics().get("inverse_updates", 0)
        seconds = _seconds(step, device)
        refreshes = optimizer.metrics()["inverse_updates"] != before
        least[refreshes] = min(least[refreshes], seconds)
    return least[0], least[1]


def _seconds(function: Callable[[], None], device: torch.device) -> float:
    """Return how long a function takes, with what it starts on the device."""
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _bytes(tensors: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, Tensor))
