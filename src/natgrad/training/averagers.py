"""Any way of averaging over nodes by its name and the options of its constructor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from natgrad import Preconditioner
from natgrad.averaging import DASO, Averager, Classic, DiLoCo, HierarchicalSGD, PostLocalSGD, StreamingDiLoCo
from natgrad.errors import require

from .naming import options_named

_CLASSES: dict[str, Callable[..., Averager]] = {
    "daso": DASO,
    "post-local": PostLocalSGD,
    "hierarchical": HierarchicalSGD,
    "diloco": DiLoCo,
    "streaming-diloco": StreamingDiLoCo,
    "classic": Classic,
}

# What the run decides.
_APART = ("model", "optimizer", "mesh", "nodes", "epochs", "steps_per_epoch", "preconditioner", "scaler")
# Whether the averager is told of the curvature, whose factors nodes then average too.
_FACTORS = "average_factors"
_WIRED = ("wire", "cycling_wire")  # options that are dtypes
_WIRES = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def names() -> list[str]:
    """Return all names."""
    return list(_CLASSES)


def options_of(name: str) -> list[str]:
    """Return the options that one takes."""
    parameters = inspect.signature(_CLASSES[name]).parameters
    own = [_FACTORS] if "preconditioner" in parameters else []
    return [option for option in parameters if option not in _APART] + own


def check(name: str, options: Mapping[str, Any]) -> None:
    """Check that there is such a way of averaging, and that it has such options.

    Raises:
        ValueError: There is not, or it has not.
    """
    require(name in _CLASSES, "averaging", name, f"one of none, {', '.join(_CLASSES)}")
    allowed = options_of(name)
    for option in options:
        what = f"one of {name}'s: {', '.join(allowed)}" if allowed else f"left out: {name} has none"
        require(option in allowed, "averaging option", option, what)
    for option in _WIRED:
        wire = options.get(option, "none")
        require(wire in _WIRES, f"averaging option {option}", wire, f"one of {', '.join(_WIRES)}")


def wraps(name: str) -> bool:
    """Return whether the model is to be wrapped over the ranks of its node."""
    return name != "classic"


def build(
    name: str,
    options: Mapping[str, Any],
    *,
    model: nn.Module,
    optimizer: Optimizer,
    mesh: DeviceMesh | None,
    preconditioner: Preconditioner | None,
    epochs: float,
    steps_per_epoch: int,
) -> Averager:
    """Return an averager; collective.

    Args:
        name: One of `names()`.
        options: Those of its constructor; dtypes by their names.
        model: As `natgrad.averaging.Averager` takes it.
        optimizer: Of the model's parameters.
        mesh: Of dimensions ("node", "local"); None: this process alone.
        preconditioner: What is before the optimizer, if anything is.
        epochs: Of the whole run.
        steps_per_epoch: Of the run.

    Raises:
        ValueError: An option's value is not allowed.
    """
    check(name, options)
    given = dict(options)
    given |= {option: _WIRES[given[option]] for option in _WIRED if option in given}
    averages = given.pop(_FACTORS, False)
    require(isinstance(averages, bool), f"averaging option {_FACTORS}", averages, "True or False")
    if averages:
        require(preconditioner is not None, f"averaging option {_FACTORS}", averages, "given with curvature")
        given["preconditioner"] = preconditioner
    if "steps_per_epoch" in inspect.signature(_CLASSES[name]).parameters:
        given |= {"epochs": epochs, "steps_per_epoch": steps_per_epoch}
    with options_named("averaging option", options):
        return _CLASSES[name](model, optimizer, mesh=mesh, **given)
