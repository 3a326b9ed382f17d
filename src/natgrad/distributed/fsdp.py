"""FSDP2 (``fully_shard``): parameters and gradients that are sharded by rows, as DTensors.

Between steps the parameters of a sharded model are DTensors. Within a forward or backward pass FSDP2 replaces them by
unsharded plain tensors, in its compute dtype. The functions in this module also accept plain tensors.

Source: Zhao et al. 2023, arXiv 2304.11277.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from natgrad.distributed.communicator import Communicator, Work, subgroup_of_world
from natgrad.errors import require
from natgrad.layers import Layer, Slot

if TYPE_CHECKING:
    from typing import TypeGuard

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Return whether `tensor` is a DTensor, without importing ``torch.distributed.tensor``."""
    return hasattr(tensor, "placements")


# --- Models -------------------------------------------------------------------------------------------------------


def reshard(modules: Iterable[nn.Module]) -> bool:
    """Make FSDP2 free parameters that an evaluation leaves unsharded; return whether it shards any of the `modules`."""
    sharded = managed(modules)
    for module in sharded:
        module.reshard()
    return bool(sharded)


def managed(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    """Return the modules that FSDP2 shards, without importing ``torch.distributed.fsdp``."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in modules if isinstance(module, fsdp.FSDPModule)]


def is_managed(module: nn.Module) -> TypeGuard[Any]:
    """Return whether FSDP2 shards a module."""
    return bool(managed([module]))


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the named parameters of the optimizer, also after a pass that has left them unsharded."""
    reshard(model.modules())
    return model.named_parameters()


@contextmanager
def extra_passes(model: nn.Module) -> Iterator[None]:
    """Make FSDP2 reshard around passes that are no part of the training, so that the optimizer updates its shards."""
    reshard(model.modules())
    try:
        yield
    finally:
        reshard(model.modules())


def owners(model: nn.Module) -> dict[nn.Module, FSDPModule]:
    """Return, for each module, the sharded module that contains it: FSDP2 unshards their parameters together."""
    found: dict[str, FSDPModule | None] = {}
    for path, module in model.named_modules():
        around = found.get(path.rpartition(".")[0]) if path else None
        found[path] = module if is_managed(module) else around
    return {model.get_submodule(path): owner for path, owner in found.items() if owner is not None}


def unshard(owner: FSDPModule | None, parameter: nn.Parameter) -> None:
    """Make FSDP2 unshard a parameter now, before its hook does."""
    if owner is not None and is_sharded(parameter):
        owner.unshard()


def check_model(model: nn.Module) -> bool:
    """Check that all DTensors of a model come from ``fully_shard``, reshard them, and return whether there are any.

    Raises:
        ValueError: if there is another DTensor, or FSDP's first version.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    first = fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules())
    require(not first, "model", "FullyShardedDataParallel", "sharded by fully_shard (FSDP2)")
    sharded = reshard(model.modules())
    managed = {id(parameter) for module in model.modules() if is_managed(module) for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        fits = not is_sharded(parameter) or id(parameter) in managed
        require(fits, "model", name, "without DTensors other than those of fully_shard (FSDP2)")
    return sharded


def check_layers(layers: Iterable[Layer]) -> None:
    """Raise a ``ValueError`` with the name of the first parameter that is sharded in another way than by rows."""
    for layer in layers:
        for slot in layer.slots:
            if is_sharded(slot.parameter):
                RowSharding.of(slot.name, slot.parameter)


def find_mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh of the sharded parameters of `model`; None: no parameter is sharded.

    Raises:
        ValueError: if parameters are sharded over different ranks.
    """
    meshes: dict[tuple[int, ...], tuple[str, DeviceMesh]] = {}
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            meshes.setdefault(_ranks(parameter.device_mesh), (name, parameter.device_mesh))
    users = [name for name, _ in meshes.values()]
    require(len(users) <= 1, "model", users, "sharded over the same ranks in all its parts")
    return next((mesh for _, mesh in meshes.values()), None)


def mesh_group(
    model_mesh: DeviceMesh, process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> dist.ProcessGroup | None:
    """Return a process group of all ranks of the model's mesh, which may have several dimensions.

    Raises:
        ValueError: if the user's `process_group` or `mesh` has other ranks.
    """
    ranks = _ranks(model_mesh)
    allowed = f"left out, or of the ranks over which FSDP2 shards: {ranks}"
    require(mesh is None or _ranks(mesh) == ranks, "mesh", mesh, allowed)
    if process_group is not None:
        agrees = sorted(dist.get_process_group_ranks(process_group)) == list(ranks)
        require(agrees, "process_group", process_group, allowed)
        return process_group
    if model_mesh.ndim == 1:
        return model_mesh.get_group()
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return subgroup_of_world(ranks)


def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def plain_copy(root: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy of `root` with full tensors, without FSDP2's classes, hooks and state; collective.

    FSDP2's classes refuse to be copied. So their modules are copied into objects of the class that was sharded.
    """
    copies: dict[int, Any] = {}  # the memo of ``copy.deepcopy``: the copy by the ``id`` of the original
    for parameter in root.parameters():
        copies[id(parameter)] = nn.Parameter(whole(parameter), requires_grad=parameter.requires_grad)
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    sharded = [module for module in root.modules() if is_managed(module)]
    no_state = _NoState()
    for module in sharded:
        original: Any = next(base for base in type(module).__mro__ if not issubclass(base, fsdp.FSDPModule))
        copies[id(module)] = original.__new__(original)
        copies[id(fsdp.fully_shard.state(module))] = no_state
    for module in sharded:
        copies[id(module)].__setstate__(copy.deepcopy(module.__getstate__(), copies))
    plain = copy.deepcopy(root, copies)
    for module in plain.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            # FSDP2's hooks are methods of its state, so their copies are methods of `no_state`.
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is no_state]:
                del hooks[key]
    return plain if dtype is None else plain.to(dtype)


class _NoState:
    """Stands for FSDP2's state in a copy."""


# --- Tensors ------------------------------------------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    """Return the shard of a DTensor that this rank holds, or a plain tensor itself; no copy."""
    shard: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return shard


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor with all rows; collective if it is sharded."""
    gathered: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return gathered.detach().clone()


def own_rows(name: str, tensor: Tensor) -> tuple[int, Tensor]:
    """Return the index of the first row that this rank holds of a parameter or gradient, and a view of its rows."""
    if not is_sharded(tensor):
        return 0, tensor
    sharding, rows = RowSharding.of(name, tensor), tensor.to_local()
    require(rows.is_contiguous(), name, rows.stride(), "contiguous, as FSDP2 makes it")
    return sharding.start(sharding.rank), rows


def held_rows(slot: Slot, rows: range) -> Tensor | None:
    """Return a view of some rows of ``.grad`` that this rank holds; None: there is no gradient."""
    if slot.parameter.grad is None:
        return None
    start, held = own_rows(slot.name, slot.parameter.grad)
    return held[rows.start - start : rows.stop - start] if len(rows) else held[:0]


def shard_group(name: str, tensor: Tensor) -> dist.ProcessGroup | None:
    """Return the process group that the rows of a tensor are sharded over; None: each rank holds all rows."""
    return RowSharding.of(name, tensor).group if is_sharded(tensor) else None


# --- Blocks -------------------------------------------------------------------------------------------------------


def slot_rows(slot: Slot) -> range:
    """Return the rows of a parameter that belong to the layer."""
    return range(slot.parameter.shape[0])[slice(None) if slot.rows is None else slot.rows]


def from_blocks(layer: Layer, slot: Slot, blocks: Tensor) -> Tensor:
    """Return a tensor with the shape of a parameter, from its columns ``[n, o, ...]`` of the layer's blocks."""
    tensor = blocks.new_empty(slot.parameter.shape)
    rows, place = layer.align(slot, tensor, blocks)
    rows.copy_(place)
    return tensor


def gradient_target(layer: Layer, slot: Slot, gradient: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a gradient, and the values of `blocks` ``[n, o, ...]`` in the same shape."""
    if not is_sharded(gradient):
        return layer.align(slot, gradient, blocks)
    (start, held), part = own_rows(slot.name, gradient), slot_rows(slot)
    first = max(start, part.start)
    last = max(first, min(start + len(held), part.stop))
    return held[first - start : last - start], from_blocks(layer, slot, blocks)[first:last]


def put_rows(found: dict[int, Tensor], slot: Slot, start: int, rows: Tensor) -> None:
    """Write rows of a parameter, which may be flat, to a tensor as it is in `found`, by its ``id``."""
    whole = found.get(id(slot.parameter))
    if whole is None:
        whole = found[id(slot.parameter)] = rows.new_zeros(slot.parameter.shape, dtype=slot.parameter.dtype)
    rows = rows.reshape(-1, *whole.shape[1:])
    whole[start : start + len(rows)] = rows


# --- Ranks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowSharding:
    """The distribution of the rows of a DTensor of this shape over ranks, as by ``torch.chunk``.

    Attributes:
        group: The process group over which rows are sharded. None: each rank holds all rows.
        ranks: The number of its ranks, S.
        rank: The rank of this process in the group.
        axis: The dimension of the mesh along which rows are sharded. None: each rank holds all rows.
    """

    group: dist.ProcessGroup | None
    ranks: int
    rank: int
    shape: torch.Size
    mesh: DeviceMesh
    axis: int | None

    @classmethod
    def of(cls, name: str, tensor: DTensor) -> RowSharding:
        """Return the distribution of `tensor`, the parameter `name`.

        Raises:
            ValueError: unless it is sharded by rows over at most one dimension of its mesh, and otherwise replicated.
        """
        mesh, placements = tensor.device_mesh, tensor.placements
        split = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
        # By name, because the strided shards of tensor parallelism are a subclass.
        rows = all(type(placements[axis]).__name__ == "Shard" and placements[axis].is_shard(0) for axis in split)
        allowed = "of one Shard(0) placement and otherwise Replicate, as by fully_shard; or exclude its layer"
        require(rows and len(split) <= 1, name, placements, allowed)
        home = tensor.device.type == mesh.device_type
        require(home, name, tensor.device, f"on {mesh.device_type}, the device of its mesh, without CPU offloading")
        if not split:
            return cls(None, 1, 0, tensor.shape, mesh, None)
        axis = split[0]
        return cls(mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis), tensor.shape, mesh, axis)

    def start(self, rank: int) -> int:
        """Return the first row of `rank`."""
        return min(rank * -(-self.shape[0] // self.ranks), self.shape[0])


class Holders:
    """Looks up the rows of parameters that each rank holds, and the ranks that hold the others.

    A replica of the model is sharded over S ranks: all of them, or fewer under HSDP.
    """

    def __init__(self, runtime: Communicator) -> None:
        """Initialize an empty cache, which is valid while the meshes of parameters do not change."""
        self._group = runtime.group
        self._known: dict[int, tuple[RowSharding, dict[int, list[int]]]] = {}

    def rows(self, slot: Slot, rank: int) -> range:
        """Return the rows that `rank` holds of a parameter, or of the part of it that belongs to the layer."""
        whole = slot_rows(slot)
        if not is_sharded(slot.parameter):
            return whole
        sharding, replicas = self._find(slot)
        shard = replicas[rank].index(rank)
        start = max(whole.start, sharding.start(shard))
        return range(start, max(start, min(whole.stop, sharding.start(shard + 1))))

    def peers(self, slot: Slot, rank: int) -> list[int]:
        """Return the ranks of the same replica of a sharded parameter as `rank`, in the order of their rows."""
        return self._find(slot)[1][rank]

    def _find(self, slot: Slot) -> tuple[RowSharding, dict[int, list[int]]]:
        """Return the distribution of a sharded parameter, and for each rank those of its replica."""
        key = id(slot.parameter)
        if key not in self._known:
            assert is_sharded(slot.parameter)
            assert self._group is not None
            sharding = RowSharding.of(slot.name, slot.parameter)
            mesh = sharding.mesh.mesh
            table = (mesh if sharding.axis is None else mesh.movedim(sharding.axis, -1)).reshape(-1, sharding.ranks)
            replicas = [[dist.get_group_rank(self._group, rank) for rank in row] for row in table.tolist()]
            self._known[key] = sharding, {rank: replica for replica in replicas for rank in replica}
        return self._known[key]


def post_rows(
    wanted: Iterable[tuple[Slot, torch.dtype, tuple[int, ...]]],
    of: Callable[[Slot, range], Tensor],
    runtime: Communicator,
    kind: str,
) -> Callable[[], dict[int, Tensor]]:
    """Start to send all rows of sharded parameters to the ranks that want them; collective.

    `wanted` is equal on all ranks: parameters, dtypes to send them in, and receivers. `of` returns rows that this rank
    holds. Plain parameters are left out. The result is a function that returns whole tensors by ``id``.
    """
    holders = Holders(runtime)
    kinds: dict[tuple[torch.device, torch.dtype], list[tuple[Slot, tuple[int, ...]]]] = {}
    for slot, dtype, receivers in wanted:
        if is_sharded(slot.parameter):
            kinds.setdefault((slot.parameter.device, dtype), []).append((slot, receivers))
    gathered: dict[int, Tensor] = {}
    posted: list[tuple[Work, list[list[tuple[Slot, range]]], list[list[int]]]] = []
    for (device, dtype), slots in kinds.items():
        nothing = torch.empty(0, dtype=dtype, device=device)
        outgoing: list[list[Tensor]] = [[nothing] for _ in range(runtime.ranks)]
        incoming: list[list[tuple[Slot, range]]] = [[] for _ in range(runtime.ranks)]
        for slot, receivers in slots:
            local_rows = holders.rows(slot, runtime.rank)
            for worker in receivers:
                if worker != runtime.rank:
                    if len(local_rows) and runtime.rank in holders.peers(slot, worker):
                        outgoing[worker].append(of(slot, local_rows).reshape(-1).to(dtype))
                    continue
                for peer in holders.peers(slot, worker):
                    rows = holders.rows(slot, peer)
                    if peer == worker:
                        put_rows(gathered, slot, rows.start, of(slot, rows).to(dtype))  # as other rows arrive
                    elif len(rows):
                        incoming[peer].append((slot, rows))
        messages = [torch.cat(parts) for parts in outgoing]
        runtime.count(kind, sum(message.nbytes for message in messages))
        sizes = [[len(rows) * math.prod(slot.parameter.shape[1:]) for slot, rows in parts] for parts in incoming]
        posted.append((runtime.post_redistribute(messages, list(map(sum, sizes)), kind), incoming, sizes))

    def finish() -> dict[int, Tensor]:
        for work, incoming, sizes in posted:
            for parts, lengths, message in zip(incoming, sizes, work.wait(), strict=True):
                for (slot, rows), vector in zip(parts, message.split(lengths), strict=True):
                    put_rows(gathered, slot, rows.start, vector)
        return gathered

    return finish
