"""FSDP2 (``fully_shard``): parameters and gradients whose rows are spread over ranks, as DTensors.

Between steps the parameters of a sharded model are DTensors. Within a forward or backward pass FSDP2 replaces them by
whole plain tensors, in the dtype that it computes in. The functions here also accept plain tensors, of which each rank
holds all rows, so that the rest of the library need not ask whether a model is sharded.

FSDP: Zhao et al. 2023, arXiv 2304.11277.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from natgrad.distributed.communicator import Communicator
from natgrad.distributed.groups import subgroup_of_world
from natgrad.errors import require
from natgrad.layers import Layer, Slot

if TYPE_CHECKING:
    from typing import TypeGuard

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

# Consecutive rows of a parameter: the index of the first, and the rows as one contiguous tensor.
Piece = tuple[int, Tensor]


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Return whether `tensor` is a DTensor, without the import of a module that most users never need."""
    return hasattr(tensor, "placements")


# --- Models -------------------------------------------------------------------------------------------------------


def reshard(modules: Iterable[nn.Module]) -> bool:
    """Have FSDP2 restore the sharded parameters, which it leaves gathered after some passes, such as an evaluation.

    Returns:
        Whether FSDP2 shards any of the `modules`.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    sharded: list[Any] = [module for module in modules if isinstance(module, fsdp.FSDPModule)] if fsdp else []
    for module in sharded:
        module.reshard()
    return bool(sharded)


@contextmanager
def resharded(model: nn.Module) -> Iterator[bool]:
    """Run extra passes of a model within, with its parameters sharded before and after.

    FSDP2 may leave parameters gathered; the next pass would then not see the optimizer's update of the shards.

    Yields:
        Whether FSDP2 shards any module. If so, a rank that raises must exit: the others wait for it in the passes.
    """
    sharded = reshard(model.modules())
    try:
        yield sharded
    finally:
        reshard(model.modules())


def owners(model: nn.Module) -> dict[nn.Module, FSDPModule]:
    """Return the nearest sharded module at or around each module: FSDP2 gathers their parameters together."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    found: dict[str, Any] = {}
    for path, module in model.named_modules() if fsdp else ():
        around = found.get(path.rpartition(".")[0]) if path else None
        found[path] = module if isinstance(module, fsdp.FSDPModule) else around
    return {model.get_submodule(path): owner for path, owner in found.items() if owner is not None}


def unshard(owner: FSDPModule | None, parameter: nn.Parameter) -> None:
    """Have FSDP2 gather a sharded parameter now, before its own hook would."""
    if owner is not None and is_sharded(parameter):
        owner.unshard()


def check_model(model: nn.Module) -> None:
    """Check that all DTensors among the parameters come from ``fully_shard``.

    Raises:
        ValueError: naming another DTensor, or FSDP's first version.
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
    """Check that the parameters of `layers` are sharded in a supported way.

    Raises:
        ValueError: naming the first that is not.
    """
    for layer in layers:
        for slot in layer.slots:
            if is_sharded(slot.parameter):
                Spread.of(slot.name, slot.parameter)


def find_mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh that the parameters of `model` are sharded over; None: no parameter is sharded.

    Raises:
        ValueError: if they are sharded over different ranks.
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
    """Return the process group of all ranks of a mesh of any dimension, made if there is none yet.

    Args:
        model_mesh: The mesh that the model is sharded over.
        process_group: The group that the user gave, or None.
        mesh: The mesh that the user gave, or None.

    Raises:
        ValueError: if the user gave other ranks.
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
    """Return a copy of `root` with whole parameters, without compilation and without FSDP2's classes and hooks."""
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
    """Takes the place of FSDP2's state in a copy."""


# --- Tensors ------------------------------------------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, without a copy: its shard, or a plain tensor itself."""
    shard: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return shard


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor with all rows; collective if it is sharded."""
    gathered: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return gathered.detach().clone()


def own_rows(name: str, tensor: Tensor) -> Piece:
    """Return the rows of a parameter or gradient that this rank holds, without a copy."""
    if not is_sharded(tensor):
        return 0, tensor
    spread, rows = Spread.of(name, tensor), tensor.to_local()
    require(rows.is_contiguous(), name, rows.stride(), "contiguous, as FSDP2 makes it")
    return spread.start(spread.rank), rows


def held_rows(slot: Slot, rows: range) -> Tensor | None:
    """Return some of the rows of ``.grad`` that this rank holds, without a copy; None: there is no gradient."""
    gradient = slot.parameter.grad
    return None if gradient is None else rows_of(slot.name, gradient, rows)


def rows_of(name: str, tensor: Tensor, rows: range) -> Tensor:
    """Return some of the rows of a tensor that this rank holds, without a copy."""
    start, held = own_rows(name, tensor)
    return held[rows.start - start : rows.stop - start] if len(rows) else held[:0]


def first_copy(name: str, tensor: Tensor, rank: int) -> Tensor | None:
    """Return this rank's part of the first replica of a tensor among the ranks; None: it has none."""
    if not is_sharded(tensor):
        return tensor if rank == 0 else None
    spread, place = Spread.of(name, tensor), tensor.device_mesh.get_coordinate()
    assert place is not None  # of a rank of the mesh
    first = all(index == 0 for axis, index in enumerate(place) if axis != spread.axis)
    return tensor.to_local() if first else None


def copies(name: str, parameter: Tensor, ranks: int) -> float:
    """Return how many of `ranks` ranks hold the same rows of a parameter as this one."""
    return ranks / (Spread.of(name, parameter).ranks if is_sharded(parameter) else 1)


def shard_group(name: str, tensor: Tensor) -> dist.ProcessGroup | None:
    """Return the process group that a tensor is sharded over; None: each rank holds all rows.

    Raises:
        ValueError: if it is sharded otherwise than by rows.
    """
    return Spread.of(name, tensor).group if is_sharded(tensor) else None


# --- Blocks -------------------------------------------------------------------------------------------------------


def match(layer: Layer, slot: Slot, tensor: Tensor, blocks: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Return this rank's part of a tensor shaped as a parameter, with its place in the blocks of the layer.

    Args:
        layer: The layer.
        slot: The parameter.
        tensor: The tensor.
        blocks: The parameter's columns of the blocks ``[n, o, ...]``.

    Returns:
        Views of `tensor` and of `blocks`, of equal shapes.
    """
    if not is_sharded(tensor):
        return [layer.align(slot, tensor, blocks)]
    return pairs(layer, slot, [own_rows(slot.name, tensor)], blocks)


def pairs(layer: Layer, slot: Slot, pieces: Iterable[Piece], blocks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows of a parameter with their places in the blocks of the layer, without copies.

    Args:
        layer: The layer.
        slot: The parameter.
        pieces: The rows.
        blocks: The parameter's columns of the blocks ``[n, o, ...]``.

    Yields:
        Views of the pieces and of `blocks`, of equal shapes.
    """
    shape = slot.parameter.shape
    whole = torch.empty(shape, device="meta")  # only shapes, strides and offsets of its views are used
    row = max(1, math.prod(shape[1:]))
    laid, places = layer.align(slot, whole, blocks)
    for start, piece in pieces:
        stop = start + piece.numel() // row
        for part, place in _cut(laid, places, row, start, stop):
            offset = piece.storage_offset() + part.storage_offset() - start * row
            yield piece.as_strided(part.shape, part.stride(), offset), place


def _cut(laid: Tensor, places: Tensor, row: int, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parts of a view of a contiguous parameter that lie in some of its rows.

    Args:
        laid: The view.
        places: A tensor of the same shape, cut likewise.
        row: The number of elements of a row.
        start: The first row.
        stop: The row after the last.
    """
    along = [axis for axis in range(laid.ndim) if laid.shape[axis] > 1 and laid.stride(axis) >= row]
    axis = max(along, key=laid.stride, default=None)
    first = laid.storage_offset() // row
    if axis is None:
        if start <= first < stop:
            yield laid, places
        return
    step = laid.stride(axis) // row
    if len(along) > 1:  # the rows lie along several axes, such as groups and their inputs
        for part, place in zip(laid.unbind(axis), places.unbind(axis), strict=True):
            yield from _cut(part, place, row, start, stop)
        return
    low, high = (min(max(0, -(-(bound - first) // step)), laid.shape[axis]) for bound in (start, stop))
    if low < high:
        yield laid.narrow(axis, low, high - low), places.narrow(axis, low, high - low)


def shares(layer: Layer) -> tuple[tuple[int, ...], int]:
    """Return the number of elements of a layer's parameters on each shard, and of those that are not sharded.

    The former is empty where no parameter is sharded.
    """
    held: list[list[int]] = []
    replicated = 0
    for slot in layer.slots:
        shape = slot.parameter.shape
        first, stop = (0, shape[0]) if slot.rows is None else (slot.rows.start, slot.rows.stop)
        row = math.prod(shape[1:])
        spread = Spread.of(slot.name, slot.parameter) if is_sharded(slot.parameter) else None
        if spread is None or spread.ranks == 1:
            replicated += (stop - first) * row
            continue
        ends = [min(max(spread.start(rank), first), stop) for rank in range(spread.ranks + 1)]
        held.append([(end - start) * row for start, end in pairwise(ends)])
    return (tuple(map(sum, zip(*held, strict=True))), replicated) if held else ((), 0)


# --- Ranks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """How the rows of a DTensor are spread over ranks, as ``torch.chunk`` does it.

    Attributes:
        group: The ranks that share the rows; None: each rank holds all of them.
        ranks: S, their number.
        rank: This process's rank among them.
        shape: The shape of the whole tensor.
        mesh: The mesh of the tensor.
        axis: The dimension of the mesh along which ranks share the rows; None: each holds all of them.
    """

    group: dist.ProcessGroup | None
    ranks: int
    rank: int
    shape: torch.Size
    mesh: DeviceMesh
    axis: int | None

    @classmethod
    def of(cls, name: str, tensor: DTensor) -> Spread:
        """Return that of `tensor`.

        Raises:
            ValueError: unless it is sharded by rows over one dimension of its mesh at most, and otherwise replicated.
        """
        mesh, placements = tensor.device_mesh, tensor.placements
        split = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
        # By name: the strided shards of tensor parallelism have a class of their own.
        rows = all(type(placements[axis]).__name__ == "Shard" and placements[axis].is_shard(0) for axis in split)
        allowed = "placements that are Shard(0) once and else Replicate, as fully_shard makes; or leave its layer out"
        require(rows and len(split) <= 1, name, placements, allowed)
        home = tensor.device.type == mesh.device_type
        require(home, name, tensor.device, f"on {mesh.device_type}, where its mesh is: no CPU offloading")
        if not split:
            return cls(None, 1, 0, tensor.shape, mesh, None)
        axis = split[0]
        return cls(mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis), tensor.shape, mesh, axis)

    def start(self, rank: int) -> int:
        """Return the first row of `rank`."""
        return min(rank * -(-self.shape[0] // self.ranks), self.shape[0])


class Holders:
    """Looks up which rank holds which rows of parameters, while their meshes stay the same.

    A replica of the model is spread over S ranks: all of them, or fewer under HSDP.
    """

    def __init__(self, runtime: Communicator) -> None:
        """Start with an empty cache."""
        self._runtime = runtime
        self._spreads: dict[int, tuple[Spread, list[tuple[int, tuple[int, ...]]]]] = {}
        self._seats: dict[tuple[int, int | None], list[tuple[int, tuple[int, ...]]]] = {}

    def rows(self, slot: Slot, rank: int) -> range:
        """Return the rows that `rank` holds of a parameter, or of the part of it that belongs to the layer."""
        whole = range(slot.parameter.shape[0])[slice(None) if slot.rows is None else slot.rows]
        if not is_sharded(slot.parameter):
            return whole
        spread, seats = self._look_up(slot)
        shard, _ = seats[rank]
        start = max(whole.start, spread.start(shard))
        return range(start, max(start, min(whole.stop, spread.start(shard + 1))))

    def peers(self, slot: Slot, rank: int) -> list[int]:
        """Return the ranks of the same replica of a sharded parameter as `rank`, in the order of their rows."""
        _, seats = self._look_up(slot)
        return sorted((peer for peer in range(len(seats)) if seats[peer][1] == seats[rank][1]), key=seats.__getitem__)

    def together(self, slot: Slot, rank: int, other: int) -> bool:
        """Return whether two ranks hold parts of the same copy of a sharded parameter."""
        _, seats = self._look_up(slot)
        return seats[rank][1] == seats[other][1]

    def _look_up(self, slot: Slot) -> tuple[Spread, list[tuple[int, tuple[int, ...]]]]:
        """Return how a parameter is spread, and for each rank its shard and its replica."""
        key = id(slot.parameter)
        if key not in self._spreads:
            assert is_sharded(slot.parameter)
            spread = Spread.of(slot.name, slot.parameter)
            form = id(spread.mesh), spread.axis
            if form not in self._seats:
                self._seats[form] = self._seated(spread.mesh, spread.axis)
            self._spreads[key] = spread, self._seats[form]
        return self._spreads[key]

    def _seated(self, mesh: DeviceMesh, axis: int | None) -> list[tuple[int, tuple[int, ...]]]:
        group = self._runtime.group
        assert group is not None
        seats = []
        for rank in range(self._runtime.ranks):
            place = (mesh.mesh == dist.get_global_rank(group, rank)).nonzero()[0].tolist()
            copy = tuple(index for dimension, index in enumerate(place) if dimension != axis)
            seats.append((0 if axis is None else place[axis], copy))
        return seats


def collect_rows(
    wanted: Iterable[tuple[Slot, tuple[int, ...]]],
    of: Callable[[Slot, range], Tensor],
    runtime: Communicator,
    kind: str,
) -> dict[int, list[Piece]]:
    """Send all rows of sharded parameters, or of tensors shaped like them, to some ranks.

    Args:
        wanted: Parameters, or parts of them, with the ranks that receive the rows; the same on every rank.
        of: Returns rows that this rank holds, in the parameter's dtype.
        runtime: The ranks.
        kind: The kind that the bytes are counted as.

    Returns:
        The rows, by the ``id`` of the parameter; those of plain parameters are not included.
    """
    holders = Holders(runtime)
    kinds: dict[tuple[torch.device, torch.dtype], list[tuple[Slot, tuple[int, ...]]]] = {}
    for slot, receivers in wanted:
        if is_sharded(slot.parameter):
            kinds.setdefault((slot.parameter.device, slot.parameter.dtype), []).append((slot, receivers))
    gathered: dict[int, list[Piece]] = {}
    for (device, dtype), slots in kinds.items():
        _collect(slots, of, holders, runtime, torch.empty(0, dtype=dtype, device=device), kind, gathered)
    return gathered


def _collect(
    slots: list[tuple[Slot, tuple[int, ...]]],
    of: Callable[[Slot, range], Tensor],
    holders: Holders,
    runtime: Communicator,
    nothing: Tensor,
    kind: str,
    gathered: dict[int, list[Piece]],
) -> None:
    """Add the rows of parameters of one device and dtype to `gathered`."""
    outgoing: list[list[Tensor]] = [[nothing] for _ in range(runtime.ranks)]
    places: list[list[tuple[int, int, int]]] = [[] for _ in range(runtime.ranks)]
    for slot, receivers in slots:
        parameter, own = slot.parameter, holders.rows(slot, runtime.rank)
        for worker in receivers:
            if worker != runtime.rank:
                if len(own) and holders.together(slot, worker, runtime.rank):
                    outgoing[worker].append(of(slot, own).reshape(-1))
                continue
            for peer in holders.peers(slot, worker):
                rows = holders.rows(slot, peer)
                if peer == worker:
                    gathered.setdefault(id(parameter), []).append((rows.start, of(slot, rows)))
                elif len(rows):
                    places[peer].append((id(parameter), rows.start, len(rows) * math.prod(parameter.shape[1:])))
    messages = [torch.cat(own) for own in outgoing]
    runtime.count({kind: sum(map(len, messages))}, nothing.element_size())
    arrived = runtime.redistribute(messages, [sum(size for *_, size in own) for own in places])
    for own_places, message in zip(places, arrived, strict=True):
        vectors = message.split([size for *_, size in own_places])
        for (key, start, _), vector in zip(own_places, vectors, strict=True):
            gathered.setdefault(key, []).append((start, vector))
