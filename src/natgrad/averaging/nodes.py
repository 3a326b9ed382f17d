"""The grid of nodes that averaging works on: who shares a node, and who shares a local index.

Ranks of one node talk over fast links, all of them in every step. Between nodes only the ranks of one local index talk,
one a node; the duty goes round among the indices that every node has.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from natgrad.averaging.agreement import check_alike
from natgrad.errors import require
from natgrad.placement import Runtime
from natgrad.placement.groups import timeout_of

MESH_NAMES = ("node", "local")


@dataclass(frozen=True)
class Nodes:
    """How many ranks each node has; the ranks of a node follow each other.

    Attributes:
        sizes: The ranks of each node: ``Nodes((3, 1))`` has ranks 0 to 2 on the first node, rank 3 on the second.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the sizes."""
        fits = isinstance(self.sizes, Sequence) and len(self.sizes) > 0
        fits = fits and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in self.sizes)
        require(fits, "sizes", self.sizes, "a whole number > 0 for each node")
        object.__setattr__(self, "sizes", tuple(self.sizes))

    @classmethod
    def detect(cls, group: dist.ProcessGroup | None = None) -> Nodes:
        """Return the nodes that a launcher such as ``torchrun`` has told the ranks of; collective.

        Args:
            group: The ranks; default: the world.

        Raises:
            ValueError: if LOCAL_RANK or LOCAL_WORLD_SIZE is not set on some rank, or they do not count through nodes.
        """
        own = tuple(int(os.environ.get(name, -1)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        found: list[Any] = [own] * ranks
        if ranks > 1:
            dist.all_gather_object(found, own, group=group)
        elif own == (-1, -1):
            return cls((1,))
        sizes: list[int] = []
        for rank, (local, size) in enumerate(found):
            if local == 0:
                sizes.append(size)
            fits = sizes and 0 <= local == rank - sum(sizes[:-1]) < size == sizes[-1]
            allowed = "set on every rank, as torchrun does, with the ranks of a node after each other: or tell nodes="
            require(fits, f"(LOCAL_RANK, LOCAL_WORLD_SIZE) of rank {rank}", (local, size), allowed)
        require(sum(sizes) == ranks, "LOCAL_WORLD_SIZE", sizes, f"of {ranks} ranks in all")
        return cls(tuple(sizes))

    @property
    def ranks(self) -> int:
        """All ranks together."""
        return sum(self.sizes)

    @property
    def smallest(self) -> int:
        """The ranks of the smallest node: how many local indices there are one of on every node."""
        return min(self.sizes)

    @cached_property
    def grid(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        starts = [sum(self.sizes[:node]) for node in range(len(self.sizes))]
        return tuple(tuple(range(start, start + size)) for start, size in zip(starts, self.sizes, strict=True))


def _check_same(nodes: Nodes | DeviceMesh | None) -> None:
    """Check that all ranks were told of the same nodes: groups that differ would wait for each other for ever.

    Raises:
        AveragingError: on all ranks, if not.
    """
    told: Any = "as a launcher tells"
    if isinstance(nodes, DeviceMesh):
        if nodes.mesh.numel() != dist.get_world_size():
            return  # the rest of the world may have other things to do
        told = nodes.mesh.tolist()
    elif nodes is not None:
        told = [list(own) for own in nodes.grid] if isinstance(nodes, Nodes) else nodes
    world = Runtime(dist.group.WORLD)
    check_alike(world.everywhere((world.rank, {"nodes": told})))


class Grid:
    """This rank's place among the nodes, and the groups that it talks in; made once, by all ranks together.

    Attributes:
        sizes: The ranks of each node.
        node: The index of this rank's node.
        local: Its index within the node.
        smallest: The ranks of the smallest node.
        inside: Messages among the ranks of the own node, whose ranks in it are their local indices.
        between: Messages among the ranks of equal local index, one a node; this process alone where not every node has
            that index.
    """

    def __init__(self, nodes: Nodes | DeviceMesh | None = None) -> None:
        """Make the groups; a mesh may bring its own.

        Args:
            nodes: A two-dimensional ``DeviceMesh`` with dimensions ("node", "local"), or sizes, of the world; None: as
                `Nodes.detect` finds them.

        Raises:
            ValueError: if it does not fit the ranks.
            AveragingError: on all ranks, if they were told of different nodes.
        """
        self.sizes: tuple[int, ...]
        if not dist.is_initialized():
            fits = nodes is None or (isinstance(nodes, Nodes) and nodes.sizes == (1,))
            require(fits, "nodes", nodes, "left out without a process group")
            self.sizes, self.node, self.local = (1,), 0, 0
            self.inside = self.between = Runtime(None)
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
        """Talk in the groups of a mesh, unless the world has another timeout: theirs is half an hour, torch's own."""
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
        self.between, self.inside = map(Runtime, groups)

    def _make(self, grid: Sequence[Sequence[int]]) -> None:
        """Make groups of the ranks of each node, and of those of equal local index; all ranks of the world together."""
        world = Runtime(dist.group.WORLD)
        self.sizes = tuple(map(len, grid))
        self.node, self.local = next(
            (node, own.index(world.rank)) for node, own in enumerate(grid) if world.rank in own
        )
        shared = self.local < min(self.sizes)
        between = [own[self.local] for own in grid] if shared else [world.rank]
        self.inside, self.between = (Runtime(world.subgroup(ranks)) for ranks in (grid[self.node], between))

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.sizes)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return sum(self.sizes)

    @property
    def weights(self) -> list[float]:
        """By what each node counts: its ranks, so that every rank's samples weigh the same; equal nodes 1 each."""
        return [self.nodes * size / self.ranks for size in self.sizes]

    def duty(self, turn: int) -> int:
        """Return the local index whose ranks talk between nodes in a turn: it goes round."""
        return turn % self.smallest

    def on_duty(self, turn: int) -> bool:
        """Tell whether this rank is one of them."""
        return self.local == self.duty(turn)

    def everywhere(self, value: Any) -> list[Any]:
        """Return what each rank has, by node and local index, anything picklable; collective, and waits."""
        found = self.inside.everywhere(value)
        if self.nodes == 1:
            return found
        if self.local == 0:
            found = [one for own in self.between.everywhere(found) for one in own]
        told: list[Any] = self.inside.everywhere(found if self.local == 0 else None)[0]
        return told

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent inside its node and between nodes, in all and by kind of message."""
        result = {}
        for name, runtime in (("inside", self.inside), ("between", self.between)):
            sent = runtime.traffic()
            result[name] = sum(sent.values())
            result |= {f"{name}/{kind}": count for kind, count in sent.items()}
        return result

    def seconds(self) -> dict[str, float]:
        """Return the host seconds that this rank has spent on messages inside its node and between nodes."""
        return {"seconds/inside": self.inside.seconds, "seconds/between": self.between.seconds}
