"""Post-local and hierarchical SGD by torch's averagers, and an all-reduce of each parameter's gradient."""

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

from natgrad.averaging.base import Averager, check_parts, replica
from natgrad.averaging.exchange import gradients_of
from natgrad.averaging.nodes import Grid, Nodes
from natgrad.distributed.fsdp import find_mesh
from natgrad.errors import require
from natgrad.preconditioner.arguments import unwrap
from natgrad.schedule import check_whole


class Ring:
    """Consecutive ranks that average together. Traffic is counted as that of a ring all-reduce.

    Attributes:
        ranks: The number of ranks.
        link: The communicator that counts the traffic to the next rank: that inside the node or that between nodes.
    """

    def __init__(self, grid: Grid, ranks: int | None = None) -> None:
        """Make a ring of `ranks` consecutive ranks, or of all.

        Raises:
            ValueError: if the nodes are not the whole world, or `ranks` does not divide its size.
        """
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        require(grid.ranks == world, "nodes", grid.sizes, f"of all {world} ranks")
        self.ranks = world if ranks is None else ranks
        require(world % self.ranks == 0, "ranks", ranks, f"a divisor of {world}")
        start = rank - rank % self.ranks
        following = start + (rank - start + 1) % self.ranks
        self.link = grid.inside if following in grid.node_ranks else grid.between

    def mean_(self, tensor: Tensor, kind: str) -> None:
        """Average a tensor over the world in place, and wait. The ring must contain all ranks."""
        self.count(tensor.numel() * tensor.element_size(), kind)
        if self.ranks > 1:
            with self.link.collective():
                dist.all_reduce(tensor)
            tensor.div_(self.ranks)

    def count(self, size: int, kind: str) -> None:
        """Count the traffic of an all-reduce of `size` bytes."""
        self.link.count({kind: size}, 2 * (self.ranks - 1) / self.ranks)


class Classic(Averager):
    """Averages the gradient of each parameter over all ranks in a separate all-reduce, after the backward pass.

    Source: the "classic" method of Coquelin et al. 2021, section 4.2, where messages start during the backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        mesh: DeviceMesh | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        """Make process groups, and broadcast the parameters and buffers of rank 0; collective.

        Args:
            model: A model without a wrapper.
            optimizer: An optimizer of the model's parameters.
            mesh: A ``DeviceMesh`` with dimensions ("node", "local").
            nodes: Instead of `mesh`, the number of ranks of each node. None, without a mesh: from torchrun.

        Raises:
            ValueError: if an argument is not allowed.
            AveragingError: on all ranks, if their models differ. Nothing has been changed then.
        """
        wrapped = isinstance(model, nn.Module) and (replica(model) is not None or find_mesh(unwrap(model)) is not None)
        require(not wrapped, "model", type(model).__name__, "plain, without a wrapper")
        super().__init__(model, optimizer, mesh=mesh, nodes=nodes)
        self._ring = Ring(self.grid)

    def average_gradients(self) -> None:
        """Average ``.grad`` over all ranks, unless an earlier call in this step has done so; collective."""
        self._check_open()
        if not self._averaged:
            for gradient in gradients_of(self.parameters()):
                self._ring.mean_(gradient, "gradients")
        self._averaged = True

    def _check_wrapper(self) -> None:
        """Check nothing: SyncBatchNorm may use all ranks, and `__init__` refuses wrappers."""

    def step(self, loss: Tensor | float | None = None) -> None:
        """Average the gradients over all ranks, and step the optimizer.

        Args:
            loss: Ignored.
        """
        self.step_optimizer()

    def drain(self) -> None:
        """Do nothing: every step waits for its messages."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the state is empty."""


class _LocalSGD(Averager):
    """Averages gradients in the node, and parameters over more ranks by one of torch's averagers.

    During the warm-up, gradients are averaged over all ranks, as by torch's ``post_localSGD_hook``. Parameters without
    a gradient are not averaged, and must be the same ones on all ranks.
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
        require(not sharded, "model", "sharded by FSDP2", "plain or in DDP: torch's averagers do not support shards")
        options["warmup_steps"] = warmup_steps
        super().__init__(model, optimizer, mesh=mesh, nodes=nodes, options=options)
        self.warmup_steps = warmup_steps
        self._step = self._averagings = 0
        self._between, self._whole = self.exchange("gradients"), Ring(self.grid)
        self._averager: ModelAverager | None = None  # torch's averagers require more than one rank

    def step(self, loss: Tensor | float | None = None) -> None:
        """Average gradients, step the optimizer, and average parameters if due.

        Args:
            loss: Ignored.
        """
        self.average_gradients()
        if self._step < self.warmup_steps:
            self._between.mean_(list(gradients_of(self.parameters())))
        self.step_optimizer()
        ring = self._due(self._step)
        if self._averager is not None:
            parameters = self.parameters()
            if ring is not None:
                ring.count(sum(p.numel() * p.element_size() for p in parameters if p.grad is not None), "parameters")
                self._averagings += 1
            with self._whole.link.collective():
                self._averager.average_parameters(parameters)
        self._step += 1

    def drain(self) -> None:
        """Do nothing: every step waits for its messages."""

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of steps and of averages."""
        return {"step": self._step, "averagings": self._averagings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Raises:
            ValueError: if it is the state of another averager.
        """
        check_parts(state, {"step", "averagings"}, self)
        self._step, self._averagings = state["step"], state["averagings"]
        if self._averager is not None:
            self._averager.step = self._step

    def metrics(self) -> dict[str, float | Tensor]:
        """Return the number of averages of the parameters, and the host seconds spent on messages."""
        return {"synchronizations": self._averagings, **super().metrics()}

    def detach(self) -> None:
        """Destroy the process groups of torch's averager, and detach; collective."""
        if not self._closed:
            made = getattr(self._averager, "period_process_group_dict", {}).values()
            for group in {id(group): group for group in made if group is not dist.group.WORLD}.values():
                dist.destroy_process_group(group)
        super().detach()

    def _due(self, step: int) -> Ring | None:
        """Return the ring that averages parameters after a step, counted from 0; None: no ring does."""
        raise NotImplementedError


class PostLocalSGD(_LocalSGD):
    """Averages parameters over all ranks every `batches_between` batches, after a warm-up.

    It uses torch's ``PeriodicModelAverager``.

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
        """Make process groups, and broadcast the parameters and buffers of rank 0; collective.

        Args:
            model: Plain, or in DDP over the ranks of the node.
            optimizer: An optimizer of the model's parameters.
            mesh: A ``DeviceMesh`` with dimensions ("node", "local").
            nodes: Instead of `mesh`, the number of ranks of each node. None, without a mesh: from torchrun.
            batches_between: The steps between two averages of the parameters.
            warmup_steps: The steps of the warm-up, in which gradients are averaged over all ranks.

        Raises:
            ValueError: if an argument is not allowed.
            AveragingError: on all ranks, if their models or options differ. Nothing has been changed then.
        """
        check_whole("batches_between", batches_between, 1)
        super().__init__(model, optimizer, mesh, nodes, warmup_steps, batches_between=batches_between)
        self.batches_between = batches_between
        if self.grid.ranks > 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's advice to use DDP for an interval of 1
                self._averager = PeriodicModelAverager(batches_between, warmup_steps)

    def _due(self, step: int) -> Ring | None:
        after = step - self.warmup_steps
        return self._whole if after >= 0 and after % self.batches_between == 0 else None


class HierarchicalSGD(_LocalSGD):
    """Averages parameters over groups of ranks, over larger groups less often.

    It uses torch's ``HierarchicalModelAverager``.

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
        """Make process groups, and broadcast the parameters and buffers of rank 0; collective.

        Args:
            model: Plain, or in DDP over the ranks of the node.
            optimizer: An optimizer of the model's parameters.
            mesh: A ``DeviceMesh`` with dimensions ("node", "local").
            nodes: Instead of `mesh`, the number of ranks of each node. None, without a mesh: from torchrun.
            periods: For each level the interval in steps and the number of consecutive ranks that average together.
                Both increase, and each number divides the next; the last level has all ranks. If several levels are
                due, only the largest averages. None: all ranks every 4 steps.
            warmup_steps: The steps of the warm-up, in which gradients are averaged over all ranks.

        Raises:
            ValueError: if an argument is not allowed.
            AveragingError: on all ranks, if their models or options differ. Nothing has been changed then.
        """
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        levels = levels_of([(4, ranks)] if periods is None else periods, ranks)
        super().__init__(model, optimizer, mesh, nodes, warmup_steps, periods=levels)
        self._rings = {period: Ring(self.grid, size) for period, size in levels}
        if self.grid.ranks > 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's advice to use DDP for an interval of 1
                self._averager = HierarchicalModelAverager(OrderedDict(levels), warmup_steps)

    def _due(self, step: int) -> Ring | None:
        if step < self.warmup_steps:
            return None
        return next((self._rings[period] for period in reversed(self._rings) if step % period == 0), None)


def levels_of(periods: Any, ranks: int) -> list[tuple[int, int]]:
    """Return `periods` as a list of (interval, number of ranks).

    Raises:
        ValueError: if `periods` are not allowed for the number of ranks.
    """
    try:
        levels = [tuple(level) for level in periods]
    except TypeError:
        levels = []
    fits = bool(levels) and all(len(level) == 2 and all(map(_is_positive, level)) for level in levels)
    fits = fits and levels[-1][1] == ranks
    fits = fits and all(
        interval_2 > interval_1 and ranks_2 > ranks_1 and ranks_2 % ranks_1 == 0
        for (interval_1, ranks_1), (interval_2, ranks_2) in pairwise(levels)
    )
    allowed = (
        f"pairs of an interval and a number of ranks, both increasing, each number a divisor of the next, up to {ranks}"
    )
    require(fits, "periods", periods, allowed)
    return levels


def _is_positive(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0
