"""The nodes of a run, which are the launcher's machines or emulated ones, and the options of DASO."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from natgrad import DASO, Preconditioner
from natgrad.errors import require, require_one_of

from .curvatures import check_options

# Arguments that the run sets.
_EXCLUDED = ("model", "optimizer", "mesh", "nodes", "epochs", "steps_per_epoch", "preconditioner", "scaler")
# The option that passes the preconditioner, so that nodes also average its factors.
_FACTORS = "average_factors"
_OPTIONS = [*(option for option in inspect.signature(DASO).parameters if option not in _EXCLUDED), _FACTORS]
_WIRED = ("wire", "cycling_wire")  # options that are dtypes
_WIRES = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check(name: str, options: Mapping[str, Any]) -> None:
    """Check the name of a way of averaging, and the names of its options.

    Raises:
        ValueError: A name is unknown.
    """
    require_one_of("averaging", name, "none", "daso")
    check_options("averaging", name, options, _OPTIONS)
    for option in _WIRED:
        require_one_of(f"averaging option {option}", options.get(option, "none"), *_WIRES)


def arguments(options: Mapping[str, Any], preconditioner: Preconditioner | None) -> dict[str, Any]:
    """Return the arguments of `natgrad.DASO` for options that have passed `check`.

    Args:
        options: The options; dtypes by their names.
        preconditioner: The preconditioner, if there is one.

    Raises:
        ValueError: An option's value is not allowed.
    """
    found = {option: _WIRES[value] if option in _WIRED else value for option, value in options.items()}
    averages = found.pop(_FACTORS, False)
    require(isinstance(averages, bool), f"averaging option {_FACTORS}", averages, "True or False")
    require(
        not averages or preconditioner is not None, f"averaging option {_FACTORS}", averages, "given with curvature"
    )
    return found | {"preconditioner": preconditioner if averages else None}


def machines(workers: int) -> int:
    """Return the number of machines of `workers` ranks: 1 without an outer launcher."""
    return workers // int(os.environ.get("LOCAL_WORLD_SIZE", workers)) if "RANK" in os.environ else 1


def describe(nodes: int, workers: int) -> str:
    """Return a description of a run's nodes, which are emulated if there are more than machines."""
    return f"{nodes} {'emulated ' if nodes > machines(workers) else ''}nodes"


def node_mesh(device: torch.device, nodes: int, workers: int) -> DeviceMesh | None:
    """Return a mesh ("node", "local") of the ranks; None for a single rank. Collective."""
    if workers == 1:
        return None
    return init_device_mesh(device.type, (nodes, workers // nodes), mesh_dim_names=("node", "local"))
