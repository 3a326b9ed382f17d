"""The oldest way to train data-parallel, for comparison: one blocking all-reduce for each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from natgrad.arguments import unwrap
from natgrad.averaging.base import Averager, replica
from natgrad.averaging.nodes import Nodes
from natgrad.averaging.ring import Ring
from natgrad.errors import require
from natgrad.stacks.sharding import find_mesh


class Classic(Averager):
    """Averages the gradient of each parameter over all ranks, one after the other, after the backward pass.

    No fusion, no overlap, no narrow wire: the "classic" method of Coquelin et al. 2021, section 4.2, there with
    messages that begin in the backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        mesh: DeviceMesh | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        """Make groups, and give all ranks the parameters of rank 0; collective.

        Args:
            model: Plain: a wrapper would average too.
            optimizer: Of the model's parameters.
            mesh: The nodes.
            nodes: The nodes.

        Raises:
            ValueError: if an argument is not allowed.
            AveragingError: on all ranks, if their models differ; then nothing was changed.
        """
        wrapped = isinstance(model, nn.Module) and (replica(model) is not None or find_mesh(unwrap(model)) is not None)
        require(not wrapped, "model", type(model).__name__, "plain, without a wrapper")
        super().__init__(model, optimizer, mesh=mesh, nodes=nodes)
        self._ring = Ring(self.grid)

    def average_gradients(self) -> None:
        """Average ``.grad`` over all ranks, unless this was called since the last step; collective."""
        self._check_open()
        if not self._averaged:
            for parameter in self.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._ring.mean_(parameter.grad, "gradients")
        self._averaged = True

    def _check_wrapper(self) -> bool:
        """Allow norm statistics over all ranks, as gradients are; wrappers are refused before."""
        return False

    def step(self, loss: Tensor | float | None = None) -> None:
        """Average the gradients over all ranks, and step the optimizer.

        Args:
            loss: Not used.
        """
        self.step_optimizer()

    def drain(self) -> None:
        """Do nothing: no message is ever under way between two steps."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over nothing."""

    def metrics(self) -> dict[str, float | Tensor]:
        """Return what was waited for."""
        return {**self.grid.seconds()}
