"""Checks of DASO: its arguments, the wrapper of the model, states, and finite averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DataParallel

from natgrad.averaging.exchange import flat
from natgrad.averaging.nodes import Grid, Nodes
from natgrad.distributed import Communicator, fsdp
from natgrad.distributed.ddp import find_replica
from natgrad.errors import DivergedError, describe, require, require_one_of
from natgrad.linalg.precision import to_dtype
from natgrad.preconditioner.arguments import unwrap
from natgrad.schedule import check_whole, is_whole

# --- Arguments --------------------------------------------------------------------------------------------------


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the plain options of `natgrad.DASO`, but for the phases, the plateau rule, and the range of B and S.

    Returns:
        The options, with dtypes in the place of their names.
    """
    for name in ("batches_between", "batches_to_wait"):
        require(is_whole(options[name]), name, options[name], "a whole number")
    require_one_of("merge", options["merge"], "paper", "delta")
    require_one_of("momentum", options["momentum"], "keep", "average", "reset")
    require_one_of("duty", options["duty"], "rotating", "sharded")
    check_whole("message_bytes", options["message_bytes"], 8, 2**63 - 1)
    return {**options, **{name: to_dtype(name, options[name]) for name in ("wire", "cycling_wire")}}


def check_arguments(model: object, optimizer: object, mesh: object, nodes: object, scaler: object) -> None:
    """Check the objects that `natgrad.DASO` is given, without communication."""
    require(isinstance(model, nn.Module), "model", type(model).__name__, "an nn.Module")
    assert isinstance(model, nn.Module)
    require(not isinstance(model, DataParallel), "model", type(model).__name__, "plain, in DDP or sharded by FSDP2")
    fsdp.check_model(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        try:
            flat(tensor)
        except ValueError:
            require(False, f"model ({name})", tensor.stride(), "of tensors without gaps in memory")
    require(
        isinstance(optimizer, torch.optim.Optimizer), "optimizer", type(optimizer).__name__, "a torch.optim.Optimizer"
    )
    assert isinstance(optimizer, torch.optim.Optimizer)
    parameters = {id(parameter) for parameter in model.parameters()}
    fits = any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])
    require(fits, "optimizer", repr(optimizer), "one of the model's parameters")
    require(mesh is None or isinstance(mesh, DeviceMesh), "mesh", type(mesh).__name__, "a DeviceMesh, or None")
    require(nodes is None or isinstance(nodes, Nodes), "nodes", nodes, "a natgrad.averaging.Nodes, or None")
    require(mesh is None or nodes is None, "nodes", nodes, "left out beside a mesh")
    fits = scaler is None or isinstance(scaler, torch.amp.GradScaler)
    require(fits, "scaler", type(scaler).__name__, "a torch.amp.GradScaler, or None")


def check_wrapper(model: nn.Module, grid: Grid) -> None:
    """Raise a ``ValueError`` if DDP or FSDP2 communicates between nodes in each pass."""
    node, root = grid.node_ranks, unwrap(model)
    allowed = f"wrapped over the ranks of its node alone ({node}): between nodes DASO averages"
    replica = find_replica(model)
    if replica is not None:
        found = dist.get_process_group_ranks(replica.process_group)
        require(sorted(found) == node, "model", f"DistributedDataParallel over ranks {found}", allowed)
    mesh = fsdp.find_mesh(root)
    if mesh is not None:
        found = sorted(mesh.mesh.flatten().tolist())
        require(found == node, "model", f"FSDP2 over ranks {found}", allowed)
        sizes = grid.sizes
        require(
            len(set(sizes)) == 1, "nodes", sizes, "equal where FSDP2 shards the model: shards have to fit each other"
        )


# --- Finite averages --------------------------------------------------------------------------------------------


def check_finite(tensors: Sequence[Tensor], device: torch.device, inside: Communicator | None) -> None:
    """Check averages that are equal on all ranks, because a rank that raised alone would leave the others waiting.

    The check is collective among the ranks `inside` the node, if they hold different shards. The host waits for it.

    Raises:
        DivergedError: on all ranks, if they contain NaN or infinity.
    """
    shards = [shard for shard in map(fsdp.local, tensors) if shard.numel()]
    norms = torch._foreach_norm(shards, float("inf")) if shards else ()
    largest = torch.stack([torch.zeros((), device=device), *(norm.to(device) for norm in norms)])
    infinite = (~largest.isfinite()).sum(0, keepdim=True, dtype=torch.float32)
    if inside is not None:
        inside.sum_(infinite, "counters")
    if infinite[0] > 0:
        raise DivergedError(
            "parameters averaged over the nodes are not finite: on some rank the loss diverged or a batch was bad; "
            "go back to a checkpoint, and lower the learning rate or clip (daso.clip_grad_norm_)"
        )


# --- States -----------------------------------------------------------------------------------------------------


def check_keys(state: object, keys: set[str]) -> None:
    """Raise a ``ValueError`` unless `state` is a mapping that has `keys`."""
    fits = isinstance(state, Mapping) and keys <= state.keys()
    found = sorted(state) if isinstance(state, Mapping) else state
    require(fits, "state", found, "what DASO.state_dict() returned")


def check_saved(name: str, found: object, shapes: Sequence[Sequence[int]], allowed: str) -> None:
    """Raise a ``ValueError`` unless a state holds finite floating-point tensors of these shapes."""
    tensors: list[Any] = list(found) if isinstance(found, (list, tuple)) else [found]
    kinds = [
        each if not isinstance(each, Tensor) else tuple(each.shape) if each.is_floating_point() else describe(each)
        for each in tensors
    ]
    require(kinds == [tuple(shape) for shape in shapes], name, kinds, allowed)
    unfit = sum(int((~tensor.isfinite()).sum()) for tensor in tensors)
    require(not unfit, name, f"tensors with {unfit} elements that are nan or infinite", "finite")
