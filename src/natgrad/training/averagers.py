"""Averagers over nodes by name."""

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

from .option_errors import options_named

_CLASSES: dict[str, Callable[..., Averager]] = {
    "daso": DASO,
    "post-local": PostLocalSGD,
    "hierarchical": HierarchicalSGD,
    "diloco": DiLoCo,
    "streaming-diloco": StreamingDiLoCo,
    "classic": Classic,
}

# Arguments that the run sets.
_EXCLUDED = ("model", "optimizer", "mesh", "nodes", "epochs", "steps_per_epoch", "preconditioner", "scaler")
# The option that passes the preconditioner, so that nodes also average its factors.
_FACTORS = "average_factors"
_WIRED = ("wire", "cycling_wire")  # options that are dtypes
_WIRES = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def names() -> list[str]:
    """Return all names."""
    return list(_CLASSES)


def options_of(name: str) -> list[str]:
    """Return the options of an averager."""
    parameters = inspect.signature(_CLASSES[name]).parameters
    factors = [_FACTORS] if "preconditioner" in parameters else []
    return [option for option in parameters if option not in _EXCLUDED] + factors


def check(name: str, options: Mapping[str, Any]) -> None:
    """Check the name of an averager, and the names of its options.

    Raises:
        ValueError: A name is unknown.
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
    """Return whether the model must be wrapped over the ranks of its node."""
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
        options: Options of its constructor; dtypes by their names.
        model: The model, as for `natgrad.averaging.Averager`.
        optimizer: The optimizer of the model's parameters.
        mesh: A mesh with dimensions ("node", "local"); None for a single process.
        preconditioner: The preconditioner, if there is one.
        epochs: The length of the run.
        steps_per_epoch: The steps per epoch.

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
