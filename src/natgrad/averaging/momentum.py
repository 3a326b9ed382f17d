"""What optimizers remember of each parameter: shaped as it is (momenta, second moments), or a number beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from natgrad.averaging.nodes import Grid

Momentum = Literal["keep", "average", "reset"]


class Momenta:
    """The momenta that all ranks have.

    An optimizer makes them when it first steps with a gradient. A scaler may skip that step in one node alone, and a
    layer be used first in one node alone: messages must not differ meanwhile.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Callable[[], Mapping[str, nn.Parameter]]) -> None:
        """Know of none yet; `parameters` returns the trainable ones by name, anew each time."""
        self._optimizer, self._parameters = optimizer, parameters
        self.known: list[tuple[str, str]] = []
        """Of which parameter, and what the optimizer calls them."""

    def agree(self, grid: Grid) -> None:
        """Find out which all ranks have; collective, and waits."""
        own = [(name, key) for name, parameter in self._parameters().items() for key in self._shaped(parameter)]
        everyone = grid.everywhere(own)
        common = set(own).intersection(*everyone)
        self.known = [each for each in everyone[0] if each in common]

    def tensors(self) -> list[Tensor]:
        """Return them, in the same order on all ranks; those of frozen parameters stay."""
        parameters, state = self._parameters(), self._optimizer.state
        return [state[parameters[name]][key] for name, key in self.known if name in parameters]

    def _shaped(self, parameter: nn.Parameter) -> Iterator[str]:
        for key, value in sorted(self._optimizer.state.get(parameter, {}).items()):
            fits = isinstance(value, Tensor) and value.shape == parameter.shape
            if fits and value.is_floating_point() and value.ndim:
                yield key


def reset(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Have `optimizer` begin anew, its counts of steps too: a bias correction goes with what it corrects."""
    for parameter in parameters:
        optimizer.state.pop(parameter, None)
