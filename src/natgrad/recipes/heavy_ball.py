"""Heavy-ball momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from natgrad.distributed.fsdp import local
from natgrad.errors import require
from natgrad.schedule import check_number


class HeavyBall(Optimizer):
    """``v ← m v - η g``, ``w ← w + v``: heavy-ball momentum (Polyak 1964; Osawa 2019, eq. 19).

    v is the last step of this optimizer. A change of the weights by anything else, such as `WeightRescaling`, is not
    part of it, as in the authors' code. As printed, the difference of weights in eq. 19 is that of rescaled ones.

    `torch.optim.SGD` uses ``b ← m b + g`` and ``w ← w - η b``, so that a new learning rate also scales past gradients;
    both are equal only while η is constant.
    """

    def __init__(self, params: ParamsT, lr: float = 1e-2, momentum: float = 0.9) -> None:
        """Prepare for the parameters.

        Args:
            params: Parameters, or parameter groups, each optionally with `lr` and `momentum`.
            lr: η, at least 0.
            momentum: m, in [0, 1).

        Raises:
            ValueError: if an argument is not allowed.
        """
        check_number("lr", lr, "a number >= 0", minimum=0)
        check_number("momentum", momentum, "in [0, 1)", minimum=0)
        require(momentum < 1, "momentum", momentum, "in [0, 1)")
        params = self._checked(params)
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @staticmethod
    def _checked(params: ParamsT) -> ParamsT:
        allowed = "parameters, named parameters or parameter groups, at least one"
        fits = isinstance(params, Iterable) and not isinstance(params, (Tensor, str, bytes, set, Mapping))
        require(fits, "params", type(params).__name__, allowed)
        found: list[Any] = list(params)
        parts = [part[1] if isinstance(part, tuple) and len(part) == 2 else part for part in found]
        fits = bool(found) and all(isinstance(part, Tensor) or _is_group(part) for part in parts)
        require(fits, "params", [type(part).__name__ for part in found[:5]], allowed)
        return found

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of all parameters with a gradient.

        Args:
            closure: Evaluated first, with gradients enabled.

        Returns:
            The value of `closure`, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moving = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not moving:
                continue
            velocities = [local(self._velocity(parameter)) for parameter in moving]
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_add_(velocities, [local(parameter.grad) for parameter in moving], alpha=-group["lr"])
            torch._foreach_add_([local(parameter) for parameter in moving], velocities)
        return loss

    def _velocity(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        velocity: Tensor = state["velocity"]
        return velocity


def _is_group(part: object) -> bool:
    return isinstance(part, Mapping) and "params" in part
