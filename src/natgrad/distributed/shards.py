"""Where which rows of FSDP2's parameters and gradients lie, and how they come together.

FSDP: Zhao et al. 2023, arXiv 2304.11277.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from natgrad.distributed import Communicator
from natgrad.errors import require
from natgrad.layers import Layer, Slot

if TYPE_CHECKING:
    from typing import TypeGuard

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# Rows of a parameter, contiguous: the first one's index, and the rows end to end.
Piece = tuple[int, Tensor]


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Tell whether `tensor` is a DTensor, without the import of a module that most users never need."""
    return hasattr(tensor, "placements")


def gather(gradients: Sequence[tuple[str, DTensor]], runtime: Communicator) -> list[list[Piece]]:
    """Collect all rows of sharded gradients: one message for each dtype, device and group of shards.

    Ranks hold ``ceil(rows / S)`` rows each, the last ones fewer or none; the message of a rank with fewer elements is
    padded at its end. Each rank sends (S - 1) times its message.

    Args:
        gradients: Names and gradients, the same on all ranks.
        runtime: Does it.

    Returns:
        For each gradient the rows that each of the S ranks holds.
    """
    spreads = [Spread.of(name, gradient) for name, gradient in gradients]
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


def shares(layer: Layer) -> tuple[tuple[int, ...], int]:
    """Return the elements of a layer's sharded parameters that each shard has (none: ()), and those of its others."""
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


def own_rows(name: str, gradient: DTensor) -> list[Piece]:
    """Return the rows of a sharded gradient that this rank holds."""
    spread = Spread.of(name, gradient)
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
class Spread:
    """How the rows of one DTensor are spread, as ``torch.chunk`` does.

    Attributes:
        group: Those ranks that share the rows.
        ranks: S, their number.
        rank: This process's among them.
        shape: The shape of the whole.
        mesh: The ranks of the model.
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
            return cls(None, 1, 0, tensor.shape, mesh, None)
        axis = split[0]
        return cls(mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis), tensor.shape, mesh, axis)

    def start(self, rank: int) -> int:
        """Return the first row of `rank`."""
        return min(rank * -(-self.shape[0] // self.ranks), self.shape[0])

    def numel(self, rank: int) -> int:
        """Return how many elements `rank` holds."""
        return (self.start(rank + 1) - self.start(rank)) * math.prod(self.shape[1:])


class Holders:
    """Which rows each rank holds of the parameters of layers, as long as these stay where they are.

    A copy of the model is spread over S ranks: all of them, or under HSDP those of one replica.
    """

    def __init__(self, runtime: Communicator) -> None:
        """Look nothing up yet."""
        self._runtime = runtime
        self._spreads: dict[int, tuple[Spread, list[tuple[int, tuple[int, ...]]]]] = {}
        self._seats: dict[tuple[int, int | None], list[tuple[int, tuple[int, ...]]]] = {}

    def rows(self, slot: Slot, rank: int) -> range:
        """Return the rows of a parameter, or of the part that belongs to its layer, that `rank` holds."""
        whole = range(slot.parameter.shape[0])[slice(None) if slot.rows is None else slot.rows]
        if not is_sharded(slot.parameter):
            return whole
        spread, seats = self._look_up(slot)
        shard, _ = seats[rank]
        start = max(whole.start, spread.start(shard))
        return range(start, max(start, min(whole.stop, spread.start(shard + 1))))

    def peers(self, slot: Slot, rank: int) -> list[int]:
        """Return the ranks that together hold one copy of a sharded parameter, `rank` among them, first rows first."""
        _, seats = self._look_up(slot)
        return sorted((peer for peer in range(len(seats)) if seats[peer][1] == seats[rank][1]), key=seats.__getitem__)

    def together(self, slot: Slot, rank: int, other: int) -> bool:
        """Tell whether two ranks hold parts of the same copy of a sharded parameter."""
        _, seats = self._look_up(slot)
        return seats[rank][1] == seats[other][1]

    def _look_up(self, slot: Slot) -> tuple[Spread, list[tuple[int, tuple[int, ...]]]]:
        """Return how a parameter is spread, and of each rank which rows and which copy it holds."""
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


def held_rows(slot: Slot, rows: range) -> Tensor | None:
    """Return some of the rows of ``.grad`` that this rank holds, in place; None: there is no gradient."""
    gradient = slot.parameter.grad
    return None if gradient is None else rows_of(slot.name, gradient, rows)


def rows_of(name: str, tensor: Tensor, rows: range) -> Tensor:
    """Return some of the rows of a tensor that this rank holds, in place."""
    if not is_sharded(tensor):
        return tensor[rows.start : rows.stop]
    start, local = own_rows(name, tensor)[0]
    return local[rows.start - start : rows.stop - start] if len(rows) else local[:0]


def first_copy(name: str, tensor: Tensor, rank: int) -> Tensor | None:
    """Return what this rank holds of the first copy of a tensor that there is on the ranks; None: nothing."""
    if not is_sharded(tensor):
        return tensor if rank == 0 else None
    spread, place = Spread.of(name, tensor), tensor.device_mesh.get_coordinate()
    assert place is not None  # of a rank of the mesh
    first = all(index == 0 for axis, index in enumerate(place) if axis != spread.axis)
    return tensor.to_local() if first else None
