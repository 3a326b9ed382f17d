"""Check the preconditioner's arguments before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from natgrad.capture.counts import Reductions
from natgrad.curvature import Curvature, Curvatures
from natgrad.curvature.likelihood import Likelihood
from natgrad.damping import ByKind
from natgrad.distributed import resolve
from natgrad.distributed.ddp import find_replica
from natgrad.distributed.fsdp import check_model, find_mesh, mesh_group
from natgrad.errors import NatgradError, require, require_one_of, warn
from natgrad.layers import show_key
from natgrad.linalg.precision import resolve_precision
from natgrad.preconditioner.guard.guard import Guard
from natgrad.schedule import check_number, is_whole


def check_arguments(model: object, optimizer: object, arguments: Mapping[str, Any]) -> None:
    """Check the arguments of `natgrad.Preconditioner`, without `kl_clip` if it has its default."""
    kind = type(model).__name__
    require(isinstance(model, nn.Module), "model", kind, "an nn.Module, not its parameters")
    allowed = "plain or in DistributedDataParallel, not DataParallel"
    require(not isinstance(model, DataParallel), "model", kind, allowed)
    assert isinstance(model, nn.Module)
    check_unscripted(model)
    sharded = check_model(model)
    _check_curvature(arguments["curvature"])
    _check_optimizer(model, optimizer)
    damping, kl_clip = arguments["damping"], arguments.get("kl_clip")
    if not (damping is None or isinstance(damping, ByKind)):
        ByKind(damping)
    if kl_clip is not None:
        check_number("kl_clip", kl_clip, "a number > 0, or None", minimum=0, strict=True)
        allowed = "left out or None without an optimizer, whose learning rate it needs"
        require(optimizer is not None, "kl_clip", kl_clip, allowed)
    _check_reductions(Reductions(arguments["reduction"]), arguments["curvature"])
    resolve(arguments["placement"])
    require_one_of("gradients", arguments["gradients"], "averaged", "reduce", "auto")
    fits = not sharded or arguments["gradients"] != "reduce"
    require(fits, "gradients", arguments["gradients"], "'averaged' under FSDP2, which reduces them")
    require_one_of("accumulation", arguments["accumulation"], "mean", "sum")
    resolve_precision(arguments["precision"])
    fits = arguments["guard"] is None or isinstance(arguments["guard"], Guard)
    require(fits, "guard", arguments["guard"], "a natgrad.Guard, such as natgrad.Guard(limit=20), or None")
    check_scaler(arguments["scaler"])
    seed = arguments["seed"]
    require(is_whole(seed), "seed", seed, "a whole number")


def check_unscripted(model: nn.Module) -> None:
    """Check that ``torch.jit`` has traced or scripted no module: it does not run the hooks of layers."""
    for name, module in model.named_modules():
        allowed = f"one without modules that torch.jit has traced or scripted{f': {name!r} is one' if name else ''}"
        require(not isinstance(module, torch.jit.ScriptModule), "model", type(model).__name__, allowed)


def check_scaler(scaler: object) -> None:
    """Check that `scaler` is one, or None."""
    fits = scaler is None or isinstance(scaler, torch.amp.GradScaler)
    require(fits, "scaler", type(scaler).__name__, "a torch.amp.GradScaler, or None")


def check_dense(model: nn.Module, name: str, value: object, reader: str) -> None:
    """Check that a `reader` that needs dense gradients gets no sparse ones from the embeddings of a model.

    Raises:
        ValueError: if it does, about the argument `name`.
    """
    tables = [
        key
        for key, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad
    ]
    allowed = f"one without sparse=True in {', '.join(map(repr, tables))}: {reader} takes dense gradients only"
    require(not tables, name, value, allowed)


def _check_curvature(curvature: Curvature | Curvatures) -> None:
    drawn: set[Likelihood] = set()
    for key, choice in curvature.items() if isinstance(curvature, Mapping) else ():
        drawn |= {choice.likelihood} if choice is not None and choice.likelihood is not None else set()
        allowed = "sampled from one and the same likelihood as others"
        require(len(drawn) <= 1, f"curvature[{show_key(key)}]", choice, allowed)


def _check_optimizer(model: nn.Module, optimizer: object) -> None:
    kind = type(optimizer).__name__
    fits = optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
    require(fits, "optimizer", kind, "a torch.optim.Optimizer, not its class or name, or None")
    allowed = "an optimizer that steps once for each backward pass: LBFGS evaluates its closure within a step"
    require(not isinstance(optimizer, torch.optim.LBFGS), "optimizer", kind, allowed)
    if isinstance(optimizer, torch.optim.Optimizer):
        known = {id(parameter) for parameter in model.parameters()}
        fits = any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"])
        require(fits, "optimizer", kind, "one that holds parameters of the model")


def _check_reductions(reductions: Reductions, curvature: object) -> None:
    """Check that there is a single reduction if labels are sampled."""
    choices = curvature.values() if isinstance(curvature, Mapping) else [curvature]
    sampled = [choice for choice in choices if isinstance(choice, Curvature) and choice.likelihood is not None]
    fits = not sampled or (reductions.single is not None and not reductions.is_undecided)
    allowed = "the same word for all layers, not 'auto', with sampled labels: they are drawn for one loss"
    require(fits, "reduction", reductions.describe(), allowed)


def check_joined(model: nn.Module) -> None:
    """Check that ``DistributedDataParallel.join()`` is not active.

    Raises:
        NatgradError: if it is: ranks without further batches would not take part in the messages of `step`.
    """
    replica = find_replica(model)
    if replica is not None and replica._join_config.enable:
        raise NatgradError(
            "within DistributedDataParallel.join() ranks stop to call step() at different times: "
            "drop the last batches, or give those ranks empty ones",
            "different-ranks",
        )


def resolve_group(model: nn.Module, process_group: Any, mesh: Any) -> dist.ProcessGroup | None:
    """Return the ranks that share the model: the wrapper's, else `process_group` or `mesh`, else the world, if any.

    Raises:
        ValueError: if both are given, if one contradicts the wrapper, or if this process is not in it.
    """
    require(process_group is None or mesh is None, "mesh", mesh, "left out when process_group is given")
    sharding = find_mesh(model)
    if mesh is not None:
        fits = isinstance(mesh, dist.device_mesh.DeviceMesh) and (mesh.ndim == 1 or sharding is not None)
        require(fits, "mesh", mesh, "a one-dimensional DeviceMesh, or that of FSDP2")
        process_group = mesh.get_group() if sharding is None else None
    if process_group is not None:
        require(
            dist.is_initialized(), "process_group", process_group, "left out unless torch.distributed is initialised"
        )
        fits = isinstance(process_group, dist.ProcessGroup) and dist.get_rank(process_group) >= 0
        require(fits, "process_group", process_group, "a group that this process belongs to")
    if sharding is not None:
        return mesh_group(sharding, process_group, mesh)
    replica = find_replica(model)
    if replica is not None:
        agrees = process_group is None or process_group is replica.process_group
        require(agrees, "process_group", process_group, "left out, or the group of DistributedDataParallel itself")
        wrapped: dist.ProcessGroup = replica.process_group
        return wrapped
    if isinstance(process_group, dist.ProcessGroup):
        return process_group
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module inside ``DistributedDataParallel`` and ``torch.compile``."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def warn_of_missing_process_group() -> None:
    """Warn if torchrun started several ranks and there is no process group: each would train its own model."""
    ranks = os.environ.get("WORLD_SIZE", "")
    if not ranks.isdecimal() or int(ranks) < 2 or (dist.is_available() and dist.is_initialized()):
        return
    warn(
        f"natgrad: WORLD_SIZE={ranks} says that this process is one of {ranks} ranks, but torch.distributed is not "
        "initialised, and their models drift apart: call torch.distributed.init_process_group() before the first "
        "forward pass, or unset WORLD_SIZE if this process trains alone",
        "process-group",
    )
