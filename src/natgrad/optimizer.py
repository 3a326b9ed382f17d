"""One optimizer out of two: for trainers and schedulers that know a single object."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from natgrad.errors import NatgradWarning, require
from natgrad.preconditioner import Preconditioner
from natgrad.second_pass import Reevaluation


class PreconditionedOptimizer(Optimizer):
    """Preconditions, then steps: a ``torch.optim.Optimizer`` that shares the inner one's groups and state.

    Attributes:
        optimizer: The inner optimizer.
        preconditioner: The preconditioner.
        count: For token losses with masks, where nobody can tell `step`: how many positions of this rank count since
            the last step (`natgrad.Preconditioner.step`). `step` and `zero_grad` set it back to None.
    """

    count: int | None

    def __init__(self, optimizer: Optimizer, preconditioner: Preconditioner) -> None:
        """Join both.

        Args:
            optimizer: Any optimizer.
            preconditioner: The preconditioner of the same model.

        Raises:
            ValueError: if either is of another type, or they are not of the same model.
        """
        fits = isinstance(optimizer, Optimizer) and not isinstance(optimizer, torch.optim.LBFGS)
        allowed = "a torch.optim.Optimizer that steps without a closure"
        require(fits, "optimizer", type(optimizer).__name__, allowed)
        fits = isinstance(preconditioner, Preconditioner)
        require(fits, "preconditioner", type(preconditioner).__name__, "a natgrad.Preconditioner")
        known = preconditioner.optimizer
        allowed = "the one that the preconditioner was given, and reads the learning rate of"
        require(known is None or known is optimizer, "optimizer", repr(optimizer), allowed)
        own = {id(parameter) for parameter in preconditioner.parameters()}
        fits = any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
        require(fits or not own, "optimizer", repr(optimizer), "one of the preconditioner's model")
        self.optimizer, self.preconditioner, self.count = optimizer, preconditioner, None
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()
        for moment in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
            name = f"_optimizer_{moment}_hooks"
            setattr(self, name, getattr(optimizer, name))
        self._patch_step_function()

    # The groups, the state and the hooks of the latter are the inner optimizer's own, also after it has loaded a
    # checkpoint.

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

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        replay: Callable[[], Any] | None = None,
        count: int | None = None,
    ) -> Any:
        """Evaluate `closure`, if given, make ``.grad`` the natural gradient, and step.

        Args:
            closure: By torch's convention: clears the gradients, runs forward and backward, and returns the loss. For
                curvatures that look at the batch again (`natgrad.KBFGS`) it is evaluated once more after the step, as
                ``torch.optim.LBFGS`` does; what it logs, it logs twice.
            replay: What `natgrad.Preconditioner.step` takes as its closure, which runs no backward pass; wins over
                `closure` there.
            count: What it takes as its count; None: the attribute of this name.

        Returns:
            What `closure` returned.

        Raises:
            ValueError: as `natgrad.Preconditioner.step`; then nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._is_loaders_step():
            again = replay if replay is not None or closure is None else Reevaluation(closure)
            self.preconditioner.step(again, count=self.count if count is None else count)
            self.count = None
        self.optimizer.step()
        return loss

    def _is_loaders_step(self) -> bool:
        """Tell whether this step is one by which ``torch.distributed.checkpoint`` makes an optimizer's state exist.

        It comes at a learning rate of zero, with new gradients of zero and no backward pass: nothing to precondition.
        One rank may come alone, which is why nothing is asked of the others; in a step of a training all decide alike.
        State and learning rates are the same on all ranks. Gradients that were averaged are zero on all of them or on
        none (a sharded one is asked as a whole). Those that natgrad is yet to reduce differ, but there hooks see every
        backward pass, and a rank without one has none, or the very ones that the last step has left.
        """
        own = self.preconditioner
        if self.state or not own._capture.idle or own._given.remain():
            return False
        if any(float(group["lr"]) for group in self.param_groups if "lr" in group):
            return False
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return bool(gradients) and not any(bool(gradient.any()) for gradient in gradients)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and forget what the backward passes that made them have shown."""
        self.count = None
        self.preconditioner.discard()
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state with the preconditioner's beside it, under "preconditioner".

        ``torch.distributed.checkpoint.state_dict`` hands on the former only: save the latter beside it.
        """
        return {**self.optimizer.state_dict(), "preconditioner": self.preconditioner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both states; the preconditioner's stays as it is where it is not among them.

        Warns:
            NatgradWarning: if it is not, and the preconditioner has none of its own yet.

        Raises:
            ValueError: if either does not fit; then both are as they were.
        """
        fits = isinstance(state_dict, Mapping) and state_dict.keys() >= {"state", "param_groups"}
        found = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        require(fits, "state_dict", found, "what PreconditionedOptimizer.state_dict() returned")
        sizes, wanted = _group_sizes(state_dict), _group_sizes(self.optimizer.state_dict())
        allowed = f"the state of an optimizer whose groups hold {wanted} parameters"
        require(sizes == wanted, "state_dict['param_groups']", sizes, allowed)
        inner = {key: value for key, value in state_dict.items() if key != "preconditioner"}
        if "preconditioner" in state_dict:
            self.preconditioner.load_state_dict(state_dict["preconditioner"])
        elif not self.preconditioner.has_curvature:
            warnings.warn(
                "natgrad: this optimizer state comes without the preconditioner's, whose curvature starts anew; to "
                "resume it, save and load the preconditioner too, before the optimizer",
                NatgradWarning,
                stacklevel=2,
            )
        self.optimizer.load_state_dict(inner)

    def __getstate__(self) -> dict[str, Any]:
        """Return everything, where a plain optimizer would leave both parts out."""
        return self.__dict__.copy()

    def __repr__(self) -> str:
        """Show the inner optimizer."""
        return f"PreconditionedOptimizer({self.optimizer!r})"


def _group_sizes(state: object) -> list[int] | None:
    """Return how many parameters each group of an optimizer's state holds, or None if it is no such state."""
    try:
        return [len(group["params"]) for group in state["param_groups"]]  # type: ignore[index]
    except (KeyError, TypeError):
        return None
