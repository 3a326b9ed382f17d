"""The grid of nodes: process groups of the ranks of one node, and of the ranks with one local index."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from natgrad.distributed import Communicator
from natgrad.distributed.communicator import timeout_of
from natgrad.errors import AveragingError, require, with_suggestions

MESH_NAMES = ("node", "local")


@with_suggestions
@dataclass(frozen=True)
class Nodes:
    """The number of ranks of each node. The ranks of a node are consecutive.

    Attributes:
        sizes: The number of ranks of each node: ``Nodes((3, 1))`` has ranks 0 to 2 on the first node and rank 3 on the
            second.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        fits = isinstance(self.sizes, Sequence) and len(self.sizes) > 0
        fits = fits and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in self.sizes)
        require(fits, "sizes", self.sizes, "a whole number > 0 for each node")
        object.__setattr__(self, "sizes", tuple(self.sizes))

    @classmethod
    def detect(cls, group: dist.ProcessGroup | None = None) -> Nodes:
        """Return the nodes that a launcher such as ``torchrun`` describes in the environment; collective.

        Args:
            group: The process group. None: the world.

        Raises:
            ValueError: if LOCAL_RANK or LOCAL_WORLD_SIZE is not set on some rank, or they do not describe nodes of
                consecutive ranks.
        """
        here = tuple(int(os.environ.get(name, -1)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        found: list[Any] = [here] * ranks
        if ranks > 1:
            dist.all_gather_object(found, here, group=group)
        elif here == (-1, -1):
            return cls((1,))
        sizes: list[int] = []
        for rank, (local, size) in enumerate(found):
            if local == 0:
                sizes.append(size)
            fits = sizes and 0 <= local == rank - sum(sizes[:-1]) < size == sizes[-1]
            allowed = "set on every rank, as torchrun does, with consecutive ranks on each node; or pass nodes="
            require(fits, f"(LOCAL_RANK, LOCAL_WORLD_SIZE) of rank {rank}", (local, size), allowed)
        require(sum(sizes) == ranks, "LOCAL_WORLD_SIZE", sizes, f"of {ranks} ranks in all")
        return cls(tuple(sizes))

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return sum(self.sizes)

    @property
    def smallest(self) -> int:
        """The number of ranks of the smallest node: local indices below it exist on every node."""
        return min(self.sizes)

    @cached_property
    def grid(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        starts = [sum(self.sizes[:node]) for node in range(len(self.sizes))]
        return tuple(tuple(range(start, start + size)) for start, size in zip(starts, self.sizes, strict=True))


def describe_differences(everywhere: Sequence[tuple[int, Mapping[str, Any]]]) -> str:
    """Return the values by name that differ between some ranks, with these ranks; empty if all are equal."""
    differences = []
    for name in dict.fromkeys(name for _, theirs in everywhere for name in theirs):
        holders: list[tuple[Any, list[int]]] = []
        for rank, theirs in everywhere:
            value = theirs.get(name, "not given")
            # 4 equals 4.0, and NaN has the same text as NaN.
            ranks = next((ranks for other, ranks in holders if other == value or repr(other) == repr(value)), None)
            if ranks is None:
                holders.append((value, ranks := []))
            ranks.append(rank)
        if len(holders) > 1:
            differences.append(f"{name}: " + ", ".join(f"{value!r} on ranks {ranks}" for value, ranks in holders))
    return "; ".join(differences)


def check_equal(gather: Callable[[Any], list[Any]], **values: Any) -> None:
    """Check that plain values are equal on all ranks; `gather` returns the object of each rank; collective.

    Raises:
        AveragingError: on all ranks, with the values that differ and their ranks.
    """
    differences = describe_differences(gather((world_rank(), values)))
    if differences:
        raise AveragingError(f"the ranks differ in {differences}")


def world_rank() -> int:
    """Return this process's rank in the world; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def _check_same(nodes: Nodes | DeviceMesh | None) -> None:
    """Raise an `AveragingError` on all ranks unless they have the same argument; otherwise groups would deadlock."""
    compared: Any = "from the launcher"
    if isinstance(nodes, DeviceMesh):
        if nodes.mesh.numel() != dist.get_world_size():
            return  # ranks outside the mesh do not take part
        compared = nodes.mesh.tolist()
    elif nodes is not None:
        compared = [list(ranks) for ranks in nodes.grid] if isinstance(nodes, Nodes) else nodes
    check_equal(Communicator(dist.group.WORLD).all_gather_objects, nodes=compared)


class Grid:
    """The position of this rank among the nodes, and its process groups.

    Attributes:
        sizes: The number of ranks of each node.
        node: The index of this rank's node.
        local: The index of this rank within its node.
        smallest: The number of ranks of the smallest node.
        inside: Collectives among the ranks of this node, ordered by local index.
        between: Collectives among the ranks of this local index, one on each node. If not every node has this index,
            the group is this rank alone.
    """

    @with_suggestions
    def __init__(self, nodes: Nodes | DeviceMesh | None = None) -> None:
        """Make the process groups, or take those of a mesh; collective.

        Args:
            nodes: A ``DeviceMesh`` with dimensions ("node", "local"), or the sizes of the nodes of the world. None: as
                `Nodes.detect` finds them.

        Raises:
            ValueError: if `nodes` do not fit the ranks.
            AveragingError: on all ranks, if their arguments differ.
        """
        self.sizes: tuple[int, ...]
        if not dist.is_initialized():
            fits = nodes is None or (isinstance(nodes, Nodes) and nodes.sizes == (1,))
            require(fits, "nodes", nodes, "left out without a process group")
            self.sizes, self.node, self.local = (1,), 0, 0
            self.inside = self.between = Communicator(None)
            self.smallest = 1
            return
        _check_same(nodes)
        if isinstance(nodes, DeviceMesh):
            self._take(nodes)
        else:
            nodes = Nodes.detect() if nodes is None else nodes
            ranks = dist.get_world_size()
            require(isinstance(nodes, Nodes), "nodes", nodes, "a natgrad.Nodes, a DeviceMesh, or None")
            require(nodes.ranks == ranks, "nodes", nodes, f"of {ranks} ranks in all")
            self._make(nodes.grid)
        self.smallest = min(self.sizes)

    def _take(self, mesh: DeviceMesh) -> None:
        """Use the groups of a mesh; make new ones if the world has another timeout, which a mesh does not inherit."""
        require(mesh.mesh_dim_names == MESH_NAMES, "mesh", mesh.mesh_dim_names, f"with dimensions {MESH_NAMES}")
        place = mesh.get_coordinate()
        require(place is not None, "mesh", mesh, f"one that rank {dist.get_rank()} is in")
        table = mesh.mesh
        rising = all(bool((table.diff(dim=dim) > 0).all()) for dim in (0, 1))
        require(rising, "mesh", table.tolist(), "of ranks that rise along both dimensions")
        assert place is not None
        assert dist.group.WORLD is not None
        groups = [mesh.get_group(name) for name in MESH_NAMES]
        wanted = timeout_of(dist.group.WORLD)
        if table.numel() == dist.get_world_size() and any(timeout_of(group) != wanted for group in groups):
            self._make(table.tolist())
            return
        self.sizes = (mesh.size(1),) * mesh.size(0)
        self.node, self.local = place
        self.between, self.inside = map(Communicator, groups)

    def _make(self, grid: Sequence[Sequence[int]]) -> None:
        """Make groups of the ranks of each node, and of the ranks of each local index; collective in the world."""
        world = Communicator(dist.group.WORLD)
        self.sizes = tuple(map(len, grid))
        self.node, self.local = next(
            (node, ranks.index(world.rank)) for node, ranks in enumerate(grid) if world.rank in ranks
        )
        shared = self.local < min(self.sizes)
        between = [ranks[self.local] for ranks in grid] if shared else [world.rank]
        self.inside, self.between = (Communicator(world.subgroup(ranks)) for ranks in (grid[self.node], between))

    @property
    def node_ranks(self) -> list[int]:
        """The ranks of this node in the world, ascending."""
        group = self.inside.group
        return [0] if group is None else sorted(dist.get_process_group_ranks(group))

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.sizes)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return sum(self.sizes)

    @property
    def weights(self) -> list[float]:
        """The weight of each node, (number of nodes) · (ranks of the node) / (all ranks): 1 for nodes of equal size."""
        return [self.nodes * size / self.ranks for size in self.sizes]

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the picklable value of each rank, ordered by node and local index; collective and synchronous."""
        found = self.inside.all_gather_objects(value)
        if self.nodes == 1:
            return found
        if self.local == 0:
            found = [answer for node in self.between.all_gather_objects(found) for answer in node]
        answers: list[Any] = self.inside.all_gather_objects(found if self.local == 0 else None)[0]
        return answers

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent inside its node and between nodes, in total and by kind."""
        result = {}
        for name, runtime in (("inside", self.inside), ("between", self.between)):
            sent = runtime.traffic()
            result[name] = sum(sent.values())
            result |= {f"{name}/{kind}": count for kind, count in sent.items()}
        return result

    def seconds(self) -> dict[str, float]:
        """Return the host seconds that this rank has spent on messages inside its node and between nodes."""
        return {"seconds/inside": self.inside.seconds, "seconds/between": self.between.seconds}
