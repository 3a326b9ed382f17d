"""FSDP2 (``fully_shard``): parameters and gradients whose rows are spread over ranks as DTensors.

Between steps a sharded model shows DTensors; within a forward or backward pass of its modules FSDP2 puts whole plain
copies in their place, in the dtype that it computes in. Here alone is it known where which rows lie.

FSDP: Zhao et al. 2023, arXiv 2304.11277.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from natgrad.errors import require
from natgrad.layers import Layer, Slot
from natgrad.placement import Runtime

if TYPE_CHECKING:
    from typing import TypeGuard

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

# Rows of a parameter, contiguous: the first one's index, and the rows end to end.
Piece = tuple[int, Tensor]


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Tell whether `tensor` is a DTensor, without the import of a module that most users never need."""
    return hasattr(tensor, "placements")


def reshard(model: nn.Module) -> bool:
    """Have FSDP2 show the sharded parameters, which it leaves gathered after some passes (an evaluation, for one).

    Returns:
        Whether FSDP2 shards `model` or a part of it.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    modules = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)] if fsdp else []
    for module in modules:
        module.reshard()
    return bool(modules)


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
                _Spread.of(slot.name, slot.parameter)


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
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def gather(gradients: Sequence[tuple[str, DTensor]], runtime: Runtime) -> list[list[Piece]]:
    """Collect all rows of sharded gradients: one message for each dtype, device and group of shards.

    Ranks hold ``ceil(rows / S)`` rows each, the last ones fewer or none; the message of a rank with fewer elements is
    padded at its end. Each rank sends (S - 1) times its message.

    Args:
        gradients: Names and gradients, the same on all ranks.
        runtime: Does it.

    Returns:
        For each gradient the rows that each of the S ranks holds.
    """
    spreads = [_Spread.of(name, gradient) for name, gradient in gradients]
    messages: dict[tuple[object, ...], list[int]] = {}
    for index, ((_, gradient), spread) in enumerate(zip(gradients, spreads, strict=True)):
        messages.setdefault((id(spread.group), gradient.dtype, gradient.device), []).append(index)
    gathered: list[list[Piece]] = [[] for _ in gradients]
    for indices in messages.values():
        first = spreads[indices[0]]
        local = [_local(*gradients[index]) for index in indices]
        if first.ranks == 1:
            for index, rows in zip(indices, local, strict=True):
                gathered[index].append((0, rows))
            continue
        sizes = [[spreads[index].numel(rank) for index in indices] for rank in range(first.ranks)]
        own, longest = sum(sizes[first.rank]), max(map(sum, sizes))
        message = torch.cat([*(rows.reshape(-1) for rows in local), local[0].new_zeros(longest - own)])
        kinds = {"gradients": own, "padding": longest - own}
        for rank, arrived in enumerate(runtime.gather(message, kinds, first.group)):
            pieces = arrived[: sum(sizes[rank])].split(sizes[rank])
            for index, piece in zip(indices, pieces, strict=True):
                gathered[index].append((spreads[index].start(rank), piece))
    return gathered


def own_rows(name: str, gradient: DTensor) -> list[Piece]:
    """Return the rows of a sharded gradient that this rank holds."""
    spread = _Spread.of(name, gradient)
    return [(spread.start(spread.rank), _local(name, gradient))]


def _local(name: str, gradient: DTensor) -> Tensor:
    rows = gradient.to_local()
    require(rows.is_contiguous(), f"{name}.grad", rows.stride(), "contiguous, as FSDP2 makes it")
    return rows


def pairs(
    layer: Layer, slot: Slot, shape: torch.Size, pieces: Iterable[Piece], blocks: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Match some rows of a parameter with their places in the blocks of its layer; nothing is copied.

    Args:
        layer: The layer.
        slot: The parameter.
        shape: Its whole shape.
        pieces: Those rows.
        blocks: Its columns of the blocks ``[n, o, ...]``.

    Yields:
        Equally shaped views of the pieces and of `blocks`.
    """
    whole = torch.empty(shape, device="meta")  # only its strides matter: they tell which view of the rows is whose
    row = max(1, math.prod(shape[1:]))
    laid, places = layer.align(slot, whole, blocks)
    for start, piece in pieces:
        stop = start + piece.numel() // row
        for part, place in _cut(laid, places, row, start, stop):
            offset = piece.storage_offset() + part.storage_offset() - start * row
            yield piece.as_strided(part.shape, part.stride(), offset), place


def _cut(laid: Tensor, places: Tensor, row: int, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Restrict a view of a contiguous parameter, and `places` with it, to rows `start` to `stop` of `row` elements."""
    along = [axis for axis in range(laid.ndim) if laid.shape[axis] > 1 and laid.stride(axis) >= row]
    axis = max(along, key=laid.stride, default=None)
    first = laid.storage_offset() // row
    if axis is None:
        if start <= first < stop:
            yield laid, places
        return
    step = laid.stride(axis) // row
    if len(along) > 1:  # the rows are laid along several axes, such as groups and their inputs
        for part, place in zip(laid.unbind(axis), places.unbind(axis), strict=True):
            yield from _cut(part, place, row, start, stop)
        return
    low, high = (min(max(0, -(-(bound - first) // step)), laid.shape[axis]) for bound in (start, stop))
    if low < high:
        yield laid.narrow(axis, low, high - low), places.narrow(axis, low, high - low)


@dataclass(frozen=True)
class _Spread:
    """How the rows of one DTensor are spread, as ``torch.chunk`` does.

    Attributes:
        group: Those ranks that share the rows.
        ranks: S, their number.
        rank: This process's among them.
        shape: The shape of the whole.
    """

    group: dist.ProcessGroup | None
    ranks: int
    rank: int
    shape: torch.Size

    @classmethod
    def of(cls, name: str, tensor: DTensor) -> _Spread:
        """Read it off `tensor`.

        Raises:
            ValueError: unless it is sharded by rows over one dimension of its mesh at most, and else replicated.
        """
        mesh, placements = tensor.device_mesh, tensor.placements
        split = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
        # By name: a strided shard, as tensor parallelism makes, is of another class.
        rows = all(type(placements[axis]).__name__ == "Shard" and placements[axis].is_shard(0) for axis in split)
        allowed = "placements that are Shard(0) once and else Replicate, as fully_shard makes; or leave its layer out"
        require(rows and len(split) <= 1, name, placements, allowed)
        home = tensor.device.type == mesh.device_type
        require(home, name, tensor.device, f"on {mesh.device_type}, where its mesh is: no CPU offloading")
        if not split:
            return cls(None, 1, 0, tensor.shape)
        return cls(mesh.get_group(split[0]), mesh.size(split[0]), mesh.get_local_rank(split[0]), tensor.shape)

    def start(self, rank: int) -> int:
        """Return the first row of `rank`."""
        return min(rank * -(-self.shape[0] // self.ranks), self.shape[0])

    def numel(self, rank: int) -> int:
        """Return how many elements `rank` holds."""
        return (self.start(rank + 1) - self.start(rank)) * math.prod(self.shape[1:])


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
