"""The nodes of a run: the machines of the launcher, or emulated ones."""

from __future__ import annotations

import os

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


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
