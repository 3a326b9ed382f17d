"""The outer optimizer of DiLoCo: Nesterov's momentum on how far the nodes have gone, in a copy of the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from natgrad.errors import require
from natgrad.numerics.precision import at_least_float32
from natgrad.schedule import check_number


class Outer:
    """The parameters that all nodes agree on, and the optimizer that moves them.

    Attributes:
        held: These parameters, in at least float32; the same bits on every rank.

    Source: Douillard et al. 2023 (DiLoCo), algorithm 1.
    """

    def __init__(self, learning_rate: float, momentum: float) -> None:
        """Check the settings.

        Raises:
            ValueError: if the learning rate is no number > 0, or the momentum not from 0 to below 1.
        """
        check_number("outer_learning_rate", learning_rate, "a number > 0", minimum=0, strict=True)
        check_number("outer_momentum", momentum, "a number from 0 to below 1", minimum=0)
        require(momentum < 1, "outer_momentum", momentum, "a number from 0 to below 1")
        self._learning_rate, self._momentum = learning_rate, momentum
        self.held: list[Tensor] = []
        self._optimizer: torch.optim.Optimizer | None = None

    def start(self, parameters: Sequence[Tensor]) -> None:
        """Take a copy of parameters on which all nodes agree."""
        self.held = [each.detach().to(at_least_float32(each.dtype), copy=True) for each in parameters]
        self._optimizer = torch.optim.SGD(
            self.held, lr=self._learning_rate, momentum=self._momentum, nesterov=self._momentum > 0
        )

    def gone(self, parameters: Sequence[Tensor], chosen: Sequence[int]) -> list[Tensor]:
        """Return the outer gradients of some tensors, as numbered: where they were less where `parameters` are now."""
        return list(torch._foreach_sub([self.held[index] for index in chosen], list(parameters)))

    def step(self, gradients: Sequence[Tensor], chosen: Sequence[int]) -> list[Tensor]:
        """Move some tensors by their outer gradients, averaged over the nodes; return them."""
        assert self._optimizer is not None
        for index, gradient in zip(chosen, gradients, strict=True):
            self.held[index].grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad()
        return [self.held[index] for index in chosen]

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters and their momenta."""
        assert self._optimizer is not None
        momenta = [self._optimizer.state[each].get("momentum_buffer") for each in self.held]
        return {
            "parameters": {str(index): each for index, each in enumerate(self.held)},
            "momenta": {str(index): each for index, each in enumerate(momenta) if each is not None},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ValueError: if the parameters are others.
        """
        assert self._optimizer is not None
        shapes = [tuple(each.shape) for each in self.held]
        found = [tuple(state["parameters"][str(index)].shape) for index in range(len(state["parameters"]))]
        require(found == shapes, "state['outer']", found, f"of parameters shaped {shapes}")
        for index, each in enumerate(self.held):
            each.copy_(state["parameters"][str(index)])
            momentum = state["momenta"].get(str(index))
            self._optimizer.state[each] = {} if momentum is None else {"momentum_buffer": momentum.to(each, copy=True)}
