"""Weight decay towards 1 for the weights of norm layers, and towards 0 for all others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from natgrad.distributed.fsdp import local
from natgrad.errors import require
from natgrad.recipes.weights import is_norm, trained
from natgrad.schedule import Schedule, check_number, check_schedule, value_at

_ALLOWED = "a number >= 0"


class CenteredDecay:
    """``∇E = ∇L + γ (w - μ)``, with μ = 1 for the weights of norm layers and 0 for all others (Osawa 2019, eq. 12, 13).

    It changes ``.grad`` in place, so call it between the backward pass and the preconditioner's step, where ``.grad``
    is the gradient of the mean loss: averaged over the ranks, unscaled, and divided by the number of backward passes.
    """

    def __init__(self, model: nn.Module, decay: Schedule, *, norms: float = 1.0) -> None:
        """Prepare for a model; its parameters are looked up at each step.

        Args:
            model: The model, plain, in ``DistributedDataParallel``, or sharded by FSDP2.
            decay: γ, a number or a callable of the number of calls of `step` so far.
            norms: ρ, the factor of γ for all parameters of norm layers.

        Raises:
            ValueError: if an argument is not allowed.
        """
        require(isinstance(model, nn.Module), "model", type(model).__name__, "an nn.Module")
        check_schedule("decay", decay, _ALLOWED, minimum=0)
        check_number("norms", norms, _ALLOWED, minimum=0)
        self._model, self._decay, self._norms = model, decay, norms
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """Add ``γ (w - μ)`` to the gradients of all parameters that have one.

        Raises:
            ValueError: if the schedule returns a value that is not allowed; gradients are then unchanged.
        """
        decay = value_at("decay", self._decay, self.steps, _ALLOWED, minimum=0)
        others, norms, centred = list[nn.Parameter](), list[nn.Parameter](), list[Tensor]()
        for module, name, parameter in trained(self._model):
            if parameter.grad is None:
                continue
            (norms if is_norm(module) else others).append(parameter)
            if is_norm(module) and name == "weight":
                centred.append(local(parameter.grad))
        for parameters, rate in ((others, decay), (norms, self._norms * decay)):
            if parameters:
                gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
                torch._foreach_add_(gradients, [local(parameter) for parameter in parameters], alpha=rate)
        if centred:
            torch._foreach_sub_(centred, self._norms * decay)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        self.steps = int(state["steps"])
