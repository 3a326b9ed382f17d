"""One optimizer out of two: for trainers and schedulers that know a single object."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from natgrad.capture.reductions import Count
from natgrad.errors import NatgradWarning, require
from natgrad.preconditioner import Preconditioner
from natgrad.preconditioner.copies import parts
from natgrad.preconditioner.second_pass import Reevaluation

# So many layers a warning names.
_NAMED = 5


class PreconditionedOptimizer(Optimizer):
    """Preconditions, then steps: a ``torch.optim.Optimizer`` that shares the inner one's groups and state.

    Attributes:
        optimizer: The inner optimizer.
        preconditioner: The preconditioner.
        count: For token losses with masks, where nobody can tell `step`: how many positions of this rank count since
            the last step (`natgrad.Preconditioner.step`). `step` and `zero_grad` set it back to None.
    """

    count: Count | None

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
        self._warned_of_incomplete = False
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()
        for moment in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
            name = f"_optimizer_{moment}_hooks"
            setattr(self, name, getattr(optimizer, name))
        self._patch_step_function()

    # The groups, the state and the hooks of the latter are the inner optimizer's own, also after it has loaded a
    # checkpoint.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        replay: Callable[[], Any] | None = None,
        count: Count | None = None,
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
        """Return whether this step is one by which ``torch.distributed.checkpoint`` makes an optimizer's state exist.

        It comes at a learning rate of zero, with new gradients of zero and no backward pass: nothing to precondition.
        One rank may come alone, which is why nothing is asked of the others; in a step of a training all decide alike.
        State and learning rates are the same on all ranks. Gradients that were averaged are zero on all of them or on
        none (a sharded one is asked as a whole). Those that natgrad is yet to reduce differ, but there hooks see every
        backward pass, and a rank without one has none, or the very ones that the last step has left.
        """
        own = self.preconditioner
        if self.state or not own.parts.capture.idle or own.parts.given.remain():
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

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Return the inner optimizer's state with the preconditioner's beside it, under "preconditioner".

        ``torch.distributed.checkpoint.state_dict`` hands on the former only: save the latter beside it.

        Args:
            gather: Collect the curvature of all ranks (collective): what one rank saves is then complete. Otherwise it
                is what this rank holds, of its own layers alone where each layer has one worker or a few.

        Warns:
            NatgradWarning: once, where this rank's state is incomplete.
        """
        plan = self.preconditioner.plan
        if not gather and plan.columns > 1 and not self._warned_of_incomplete:
            self._warned_of_incomplete = True
            warnings.warn(
                f"natgrad: under placement '{plan.placement}' this state is incomplete: it holds the curvature of this "
                f"rank's layers only, and the file of one rank cannot resume all {plan.ranks}. Call "
                "state_dict(gather=True) on every rank, or save preconditioner.state_dict(gather=True) beside it, or "
                "have every rank save and load a file of its own. (torch.distributed.checkpoint takes the optimizer's "
                "part alone, which is complete: save the preconditioner with it)",
                NatgradWarning,
                stacklevel=2,
            )
        return {**self.optimizer.state_dict(), "preconditioner": self.preconditioner.state_dict(gather=gather)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both states; the preconditioner's stays as it is where it is not among them.

        Layers whose curvature is missing, as in the file of one rank where each layer has one worker, begin anew at the
        next step, on all ranks. Every rank calls it; it is collective where ranks work for some layers only.

        Warns:
            NatgradWarning: if curvature of layers is missing, naming them; or if all of it is, and the preconditioner
                has none of its own yet.

        Raises:
            ValueError: if either has what is unknown or of another shape; then both are as they were.
        """
        fits = isinstance(state_dict, Mapping) and state_dict.keys() >= {"state", "param_groups"}
        found = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        require(fits, "state_dict", found, "what PreconditionedOptimizer.state_dict() returned")
        sizes, wanted = _group_sizes(state_dict), _group_sizes(self.optimizer.state_dict())
        allowed = f"the state of an optimizer whose groups hold {wanted} parameters"
        require(sizes == wanted, "state_dict['param_groups']", sizes, allowed)
        inner = {key: value for key, value in state_dict.items() if key != "preconditioner"}
        if "preconditioner" in state_dict:
            restarted = self.preconditioner._load(state_dict["preconditioner"], partial=True)
            if restarted:
                _warn_of_restarted(restarted)
        elif not self.preconditioner.has_curvature:
            warnings.warn(
                "natgrad: this optimizer state comes without the preconditioner's, whose curvature starts anew; to "
                "resume it, save and load the preconditioner too, before the optimizer",
                NatgradWarning,
                stacklevel=2,
            )
        self.optimizer.load_state_dict(inner)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle with the model, as torch's optimizers do with their parameters; between two steps.

        The copy has a preconditioner of its own, on the model's copy, with the same arguments and state. To train both
        on, copy them together: ``copy.deepcopy((model, optimizer))``, and the ``GradScaler`` with them if there is one.
        Hooks of the user are left out, as torch does.

        Raises:
            TypeError: if the preconditioner belongs to a process group, which cannot be copied.
        """
        return copied, (type(self), self.optimizer, *parts(self.preconditioner), self.count)

    def __repr__(self) -> str:
        """Show the inner optimizer."""
        return f"PreconditionedOptimizer({self.optimizer!r})"


def copied(
    kind: type[PreconditionedOptimizer],
    optimizer: Optimizer,
    rebuild: Callable[[Optimizer, Any], Preconditioner],
    preconditioner: Any,
    count: Count | None,
) -> PreconditionedOptimizer:
    """Return the copy of a `PreconditionedOptimizer` whose parts were copied.

    Args:
        kind: Its class.
        optimizer: The inner optimizer's copy.
        rebuild: What makes the preconditioner's copy.
        preconditioner: The copies of its parts.
        count: The attribute of this name.
    """
    result = kind.__new__(kind)
    PreconditionedOptimizer.__init__(result, optimizer, rebuild(optimizer, preconditioner))
    result.count = count
    return result


def _warn_of_restarted(keys: list[str]) -> None:
    named = ", ".join(keys[:_NAMED]) + (f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else "")
    warnings.warn(
        f"natgrad: this state lacks the curvature of {named}, which begins anew at the next step; to resume all of it, "
        "save state_dict(gather=True)",
        NatgradWarning,
        stacklevel=3,
    )


def _group_sizes(state: object) -> list[int] | None:
    """Return how many parameters each group of an optimizer's state holds, or None if it is no such state."""
    try:
        return [len(group["params"]) for group in state["param_groups"]]  # type: ignore[index]
    except (KeyError, TypeError):
        return None
