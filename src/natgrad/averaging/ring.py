"""Some ranks as a ring, for methods that know no nodes: where their messages pass."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor

from natgrad.averaging.nodes import Grid
from natgrad.errors import require


class Ring:
    """Averages over this rank's neighbours, and counts that where a ring of them sends it: each rank to the next.

    Attributes:
        ranks: How many they are.
    """

    def __init__(self, grid: Grid, ranks: int | None = None) -> None:
        """Find out which link leads to the next rank; collective.

        Args:
            grid: The nodes; together the whole world.
            ranks: So many ranks that follow each other are a ring; None: all.

        Raises:
            ValueError: if the nodes are not the whole world, or do not make whole rings.
        """
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        require(grid.ranks == world, "nodes", grid.sizes, f"of all {world} ranks")
        self.ranks = world if ranks is None else ranks
        require(world % self.ranks == 0, "ranks", ranks, f"a divisor of {world}")
        start = rank - rank % self.ranks
        following = start + (rank - start + 1) % self.ranks
        self._link = grid.inside if dict(grid.everywhere((rank, grid.node)))[following] == grid.node else grid.between

    def mean_(self, tensor: Tensor, kind: str) -> None:
        """Average a tensor over the whole world, in place, and wait."""
        self.count(tensor.numel() * tensor.element_size(), kind)
        if self.ranks > 1:
            with self.talking():
                dist.all_reduce(tensor)
            tensor.div_(self.ranks)

    def count(self, size: int, kind: str) -> None:
        """Count an all-reduce of `size` bytes."""
        self._link.count({kind: size}, 2 * (self.ranks - 1) / self.ranks)

    def talking(self) -> AbstractContextManager[None]:
        """Count the seconds of a collective, and say what has happened where it fails."""
        return self._link.talking()
