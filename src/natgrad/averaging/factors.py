"""The running averages of a preconditioner's statistics, averaged over nodes: natural gradient inside, DASO between.

Each node computes factors of its own batches. Statistics measured in the node's own basis (`Task.restarts`), and those
of the last batch alone (`Statistic.decayed` is False), have a meaning in their node only and are not averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from natgrad.averaging.exchange import Exchange
from natgrad.averaging.merge import AveragedTensors
from natgrad.averaging.nodes import Grid
from natgrad.errors import require
from natgrad.preconditioner import Preconditioner
from natgrad.state.block_group import BlockGroup
from natgrad.state.tensors import along

_ALL = slice(None)


class Factors(AveragedTensors):
    """The running averages of factors with their bias corrections; a block may have statistics on some nodes only."""

    def __init__(self, exchange: Exchange, preconditioner: Preconditioner) -> None:
        """Read what `preconditioner` keeps, anew each time."""
        super().__init__("factors", exchange, self._read)
        self._preconditioner = preconditioner

    def _kept(self) -> Iterator[tuple[BlockGroup, list[Tensor], list[str]]]:
        """Yield the groups that this rank keeps averages of, their weights, and which averages can be merged.

        Also groups without statistics yet, with weight 0: another node may have some.
        """
        for group in self._preconditioner.parts.groups:
            names = [spec.name for spec in group.statistics if spec.decayed and spec.name not in group.restarting]
            if group.role.keeps_averages and names:
                group.allocate_averages()
                yield group, group.weights, names

    def _read(self) -> list[Tensor]:
        tensors = []
        for group, weights, names in self._kept():
            tensors += [*(weight.clone() for weight in weights), *(group.averages.read(name, _ALL) for name in names)]
        return tensors

    def _write(self, tensors: Sequence[Tensor]) -> None:
        merged = iter(tensors)
        for group, weights, names in self._kept():
            fresh, weight = [next(merged) for _ in weights], weights[0]
            for name in names:
                group.averages.write(name, _ALL, next(merged))
            # What is not averaged is divided by the same weight later.
            gain = torch.where(weight > 0, fresh[0] / weight.clamp(min=torch.finfo(weight.dtype).tiny), 1)
            for spec in group.statistics:
                if spec.name not in names and spec.decayed:
                    value = group.averages.read(spec.name, _ALL)
                    group.averages.write(spec.name, _ALL, value * along(gain, value.ndim - 1))
            torch._foreach_copy_(weights, fresh)


def describe(preconditioner: Preconditioner | None) -> str | None:
    """Describe what has to be the same on all nodes for factors to be averaged; None: there are no factors."""
    if preconditioner is None:
        return None
    kinds = dict.fromkeys(type(group.curvature).__name__ for group in preconditioner.parts.groups)
    return f"{' and '.join(kinds)} by the plan {preconditioner.parts.structure.digest():08x}"


def is_replicated(preconditioner: Preconditioner, ranks: int) -> bool:
    """Return whether every rank of a node keeps the running averages of all layers."""
    plan = preconditioner.plan
    return all(plan.keeps_averages(key, rank) for key in plan.seats for rank in range(ranks))


def check_owners(preconditioner: Preconditioner, grid: Grid) -> None:
    """Check that each node has the same owners of layers, at the same local indices; collective in the node.

    Raises:
        ValueError: if the preconditioner works over other ranks than those of the node, or nodes are not equal.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    theirs, ours = (runtime.all_gather_objects(rank) for runtime in (preconditioner.parts.runtime, grid.inside))
    allowed = f"one over the ranks of its node ({ours}), as with mesh=mesh['local']"
    require(theirs == ours, "preconditioner", f"a Preconditioner over ranks {theirs}", allowed)
    equal = len(set(grid.sizes)) == 1
    require(equal, "nodes", grid.sizes, "equal where the factors of a preconditioner are averaged: so are their owners")
