"""One optimizer out of two: for trainers and schedulers that know a single object."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from natgrad.errors import require
from natgrad.preconditioner import Preconditioner


class PreconditionedOptimizer(Optimizer):
    """Preconditions, then steps: a ``torch.optim.Optimizer`` that shares the inner one's groups and state.

    Attributes:
        optimizer: The inner optimizer.
        preconditioner: The preconditioner.
    """

    def __init__(self, optimizer: Optimizer, preconditioner: Preconditioner) -> None:
        """Join both.

        Args:
            optimizer: Any optimizer.
            preconditioner: The preconditioner of the same model.

        Raises:
            ValueError: if either is of another type.
        """
        require(isinstance(optimizer, Optimizer), "optimizer", type(optimizer).__name__, "a torch.optim.Optimizer")
        fits = isinstance(preconditioner, Preconditioner)
        require(fits, "preconditioner", type(preconditioner).__name__, "a natgrad.Preconditioner")
        self.optimizer, self.preconditioner = optimizer, preconditioner
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self._patch_step_function()

    # The groups and the state are the inner optimizer's own, also after it has loaded a checkpoint.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self.optimizer.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate `closure`, if given, make ``.grad`` the natural gradient, and step.

        Args:
            closure: Clears the gradients, runs forward and backward, and returns the loss.

        Returns:
            What `closure` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.preconditioner.step()
        self.optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return both states, apart."""
        return {"optimizer": self.optimizer.state_dict(), "preconditioner": self.preconditioner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both states.

        Raises:
            ValueError: if either is missing or does not fit; then the preconditioner is as it was.
        """
        missing = {"optimizer", "preconditioner"} - set(state_dict)
        require(not missing, "state_dict", sorted(state_dict), f"complete: {sorted(missing)} missing")
        self.preconditioner.load_state_dict(state_dict["preconditioner"])
        self.optimizer.load_state_dict(state_dict["optimizer"])

    def __repr__(self) -> str:
        """Show the inner optimizer."""
        return f"PreconditionedOptimizer({self.optimizer!r})"
