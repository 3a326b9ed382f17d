"""The nodes of a run: the machines that a launcher has started ranks on, or as many as the user wants emulated."""

from __future__ import annotations

import os

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def machines(workers: int) -> int:
    """Return how many machines the launcher has told the ranks of; without an outer one all ranks are on this one.

    Args:
        workers: All ranks.
    """
    return workers // int(os.environ.get("LOCAL_WORLD_SIZE", workers)) if "RANK" in os.environ else 1


def describe(nodes: int, workers: int) -> str:
    """Return how a run's nodes are called: those that share a machine are emulated."""
    return f"{nodes} {'emulated ' if nodes > machines(workers) else ''}nodes"


def node_mesh(device: torch.device, nodes: int, workers: int) -> DeviceMesh | None:
    """Return the ranks as a grid of nodes; None for this process alone. Collective."""
    if workers == 1:
        return None
    return init_device_mesh(device.type, (nodes, workers // nodes), mesh_dim_names=("node", "local"))
