"""FSDP2 (``fully_shard``): parameters and gradients whose rows are spread over ranks as DTensors.

Between steps a sharded model shows DTensors; within a forward or backward pass of its modules FSDP2 puts whole plain
copies in their place, in the dtype that it computes in. Where which rows lie is known to ``shards.py``.

FSDP: Zhao et al. 2023, arXiv 2304.11277.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from natgrad.distributed.groups import subgroup_of_world
from natgrad.distributed.shards import Spread, is_sharded
from natgrad.errors import require
from natgrad.layers import Layer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


def reshard(modules: Iterable[nn.Module]) -> bool:
    """Have FSDP2 show the sharded parameters, which it leaves gathered after some passes (an evaluation, for one).

    Returns:
        Whether FSDP2 shards any of the `modules`.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    sharded: list[Any] = [module for module in modules if isinstance(module, fsdp.FSDPModule)] if fsdp else []
    for module in sharded:
        module.reshard()
    return bool(sharded)


def owners(model: nn.Module) -> dict[nn.Module, FSDPModule]:
    """Return, for each module that FSDP2 shards, that one around it whose parameters its own are gathered with."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    found: dict[str, Any] = {}
    for path, module in model.named_modules() if fsdp else ():
        around = found.get(path.rpartition(".")[0]) if path else None
        found[path] = module if isinstance(module, fsdp.FSDPModule) else around
    return {model.get_submodule(path): owner for path, owner in found.items() if owner is not None}


def check_model(model: nn.Module) -> None:
    """Check that DTensors among the parameters come from ``fully_shard``.

    Raises:
        ValueError: naming a parameter of another origin, or FSDP's first version.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    first = fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules())
    require(not first, "model", "FullyShardedDataParallel", "sharded by fully_shard (FSDP2)")
    sharded = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)] if fsdp else []
    managed = {id(parameter) for module in sharded for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        fine = not is_sharded(parameter) or id(parameter) in managed
        require(fine, "model", name, "without DTensors other than those of fully_shard (FSDP2)")


def check_layers(layers: Iterable[Layer]) -> None:
    """Check that the parameters of `layers` are spread as is known here.

    Raises:
        ValueError: naming the first that is not.
    """
    for layer in layers:
        for slot in layer.slots:
            if is_sharded(slot.parameter):
                Spread.of(slot.name, slot.parameter)


def find_mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh that the parameters of `model` are spread over; None: no parameter is sharded.

    Raises:
        ValueError: if they are spread over different ranks.
    """
    meshes: dict[tuple[int, ...], tuple[str, DeviceMesh]] = {}
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            meshes.setdefault(_ranks(parameter.device_mesh), (name, parameter.device_mesh))
    users = [name for name, _ in meshes.values()]
    require(len(users) <= 1, "model", users, "sharded over the same ranks in all its parts")
    return next((mesh for _, mesh in meshes.values()), None)


def mesh_group(
    own: DeviceMesh, process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> dist.ProcessGroup | None:
    """Return the group of all ranks of a mesh, of whatever dimension.

    Args:
        own: The mesh that the model is sharded over.
        process_group: The user's choice of the group, or None.
        mesh: The user's word on the mesh, or None.

    Returns:
        The group; a new one where there is none yet, as of a two-dimensional mesh of a part of the world.

    Raises:
        ValueError: if the user's are other ranks.
    """
    ranks = _ranks(own)
    allowed = f"left out, or of the ranks over which FSDP2 shards: {ranks}"
    require(mesh is None or _ranks(mesh) == ranks, "mesh", mesh, allowed)
    if process_group is not None:
        agrees = sorted(dist.get_process_group_ranks(process_group)) == list(ranks)
        require(agrees, "process_group", process_group, allowed)
        return process_group
    if own.ndim == 1:
        return own.get_group()
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return subgroup_of_world(ranks)


def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor with the rows of all ranks; collective if it is sharded."""
    gathered: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return gathered.detach().clone()


def plain_copy(root: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy of `root` with whole parameters, without wrappers, compilation and hooks of FSDP2."""
    memo: dict[int, Any] = {}
    for parameter in root.parameters():
        memo[id(parameter)] = nn.Parameter(whole(parameter), requires_grad=parameter.requires_grad)
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    sharded = [module for module in root.modules() if fsdp is not None and isinstance(module, fsdp.FSDPModule)]
    classes = [type(module) for module in sharded]
    absent = _Absent()
    memo.update((id(module._get_fsdp_state()), absent) for module in sharded)
    try:
        for module in sharded:
            module.__class__ = type(module).__mro__[2]  # fully_shard put its own class before it
        plain = copy.deepcopy(root, memo)
    finally:
        for module, kind in zip(sharded, classes, strict=True):
            module.__class__ = kind
    for module in plain.modules():
        module._compiled_call_impl = None
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is absent]:
                hooks.pop(key)
    return plain if dtype is None else plain.to(dtype)


class _Absent:
    """Stands in for FSDP2's state in a copy."""
