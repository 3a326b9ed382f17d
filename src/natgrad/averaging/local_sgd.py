"""Post-local SGD and hierarchical SGD: torch's own averagers behind our interface."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager, PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.device_mesh import DeviceMesh

from natgrad.arguments import unwrap
from natgrad.averaging.base import Averager, check_parts
from natgrad.averaging.nodes import Nodes
from natgrad.averaging.ring import Ring
from natgrad.errors import require
from natgrad.schedule import check_whole
from natgrad.stacks.sharding import find_mesh


class _LocalSGD(Averager):
    """Averages gradients in the node, and parameters over more ranks when one of torch's averagers does so.

    During the warm-up gradients are averaged over all ranks instead, as by torch's ``post_localSGD_hook``. Parameters
    without a gradient are not averaged: they have to be the same ones on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh | None,
        nodes: Nodes | None,
        warmup_steps: int,
        **options: Any,
    ) -> None:
        check_whole("warmup_steps", warmup_steps, 0)
        sharded = isinstance(model, nn.Module) and find_mesh(unwrap(model)) is not None
        require(not sharded, "model", "sharded by FSDP2", "plain or in DDP: torch's averagers know no shards")
        options["warmup_steps"] = warmup_steps
        super().__init__(model, optimizer, mesh=mesh, nodes=nodes, options=options)
        self.warmup_steps = warmup_steps
        self._step = self._averagings = 0
        self._between, self._whole = self.exchange("gradients"), Ring(self.grid)
        self._averager: ModelAverager | None = None  # with one rank there is nothing to average, and torch has none

    def step(self, loss: Tensor | float | None = None) -> None:
        """Average gradients, step the optimizer, and average parameters where torch's averager says so.

        Args:
            loss: Not used.
        """
        self.average_gradients()
        if self._step < self.warmup_steps:
            self._average_everywhere()
        self.step_optimizer()
        ring = self._due(self._step)
        if self._averager is not None:
            parameters = self.parameters()
            if ring is not None:
                ring.count(sum(p.numel() * p.element_size() for p in parameters if p.grad is not None), "parameters")
                self._averagings += 1
            with self._whole.talking():
                self._averager.average_parameters(parameters)
        self._step += 1

    def drain(self) -> None:
        """Do nothing: no message is ever under way between two steps."""

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps."""
        return {"step": self._step, "averagings": self._averagings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from that step.

        Raises:
            ValueError: if it is of another kind.
        """
        check_parts(state, {"step", "averagings"}, self)
        self._step, self._averagings = state["step"], state["averagings"]
        if self._averager is not None:
            self._averager.step = self._step

    def metrics(self) -> dict[str, float | Tensor]:
        """Return how often parameters were averaged, and what was waited for."""
        return {"synchronizations": self._averagings, **self.grid.seconds()}

    def detach(self) -> None:
        """End, and destroy the process groups that were made here and by torch's averager; collective."""
        if not self._closed:
            made = getattr(self._averager, "period_process_group_dict", {}).values()
            for group in {id(each): each for each in made if each is not dist.group.WORLD}.values():
                dist.destroy_process_group(group)
        super().detach()

    def _due(self, step: int) -> Ring | None:
        """Return the ranks that average after a step, counted from 0."""
        raise NotImplementedError

    def _average_everywhere(self) -> None:
        """Average over the nodes the gradients that have been averaged in each."""
        for parameter in self.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._between.mean_(self._step, [p.grad for p in self.parameters() if p.grad is not None])


class PostLocalSGD(_LocalSGD):
    """Averages parameters over all ranks every so many batches, after a warm-up: ``PeriodicModelAverager``.

    Source: Lin et al. 2018, "Don't use large mini-batches, use local SGD".
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        mesh: DeviceMesh | None = None,
        nodes: Nodes | None = None,
        batches_between: int = 4,
        warmup_steps: int = 0,
    ) -> None:
        """Make groups, and give all ranks the parameters of rank 0; collective.

        Args:
            model: Plain, or in DDP over the ranks of the node.
            optimizer: Of the model's parameters.
            mesh: The nodes.
            nodes: The nodes.
            batches_between: Steps from one average of the parameters to the next.
            warmup_steps: Steps before, in which gradients are averaged over all ranks.

        Raises:
            ValueError: if an argument is not allowed.
            AveragingError: on all ranks, if their models or options differ; then nothing was changed.
        """
        check_whole("batches_between", batches_between, 1)
        super().__init__(model, optimizer, mesh, nodes, warmup_steps, batches_between=batches_between)
        self.batches_between = batches_between
        if self.grid.ranks > 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that an interval of 1 is better had with DDP
                self._averager = PeriodicModelAverager(batches_between, warmup_steps)

    def _due(self, step: int) -> Ring | None:
        after = step - self.warmup_steps
        return self._whole if after >= 0 and after % self.batches_between == 0 else None


class HierarchicalSGD(_LocalSGD):
    """Averages parameters over groups of ranks, the larger the less often: ``HierarchicalModelAverager``.

    Source: Wang et al. 2020, "Demystifying why local aggregation helps: convergence analysis of hierarchical SGD".
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        mesh: DeviceMesh | None = None,
        nodes: Nodes | None = None,
        periods: Sequence[tuple[int, int]] | None = None,
        warmup_steps: int = 0,
    ) -> None:
        """Make groups, and give all ranks the parameters of rank 0; collective.

        Args:
            model: Plain, or in DDP over the ranks of the node.
            optimizer: Of the model's parameters.
            mesh: The nodes.
            nodes: The nodes.
            periods: For each level an interval in steps, and how many ranks that follow each other average then, both
                growing, at last all ranks; where several are due the largest is. None: all ranks every 4 steps.
            warmup_steps: Steps before, in which gradients are averaged over all ranks.

        Raises:
            ValueError: if an argument is not allowed.
            AveragingError: on all ranks, if their models or options differ; then nothing was changed.
        """
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        levels = levels_of([(4, ranks)] if periods is None else periods, ranks)
        super().__init__(model, optimizer, mesh, nodes, warmup_steps, periods=levels)
        self._rings = {period: Ring(self.grid, size) for period, size in levels}
        if self.grid.ranks > 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that an interval of 1 is better had with DDP
                self._averager = HierarchicalModelAverager(OrderedDict(levels), warmup_steps)

    def _due(self, step: int) -> Ring | None:
        if step < self.warmup_steps:
            return None
        return next((self._rings[period] for period in reversed(self._rings) if step % period == 0), None)


def levels_of(periods: Any, ranks: int) -> list[tuple[int, int]]:
    """Return the levels of a hierarchy over so many ranks.

    Raises:
        ValueError: if `periods` are none.
    """
    pairs = isinstance(periods, Sequence) and len(periods) > 0 and all(isinstance(each, Sequence) for each in periods)
    levels: list[Any] = [tuple(each) for each in periods] if pairs else []
    pairs = pairs and all(
        len(level) == 2 and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in level)
        for level in levels
    )
    fits = bool(pairs) and levels[-1][1] == ranks
    for (often, few), (seldom, many) in pairwise(levels) if pairs else ():
        fits = fits and seldom > often and many > few and many % few == 0
    allowed = (
        f"pairs of an interval and a number of ranks, both growing, each number a divisor of the next, up to {ranks}"
    )
    require(fits, "periods", periods, allowed)
    return levels
