"""One optimizer that preconditions and steps, for trainers and schedulers that take a single object."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from natgrad.capture.counts import Count
from natgrad.distributed.fsdp import is_sharded, local, whole
from natgrad.errors import require, warn, with_address, with_suggestions
from natgrad.linalg.device import known_between, on_host
from natgrad.preconditioner import Preconditioner
from natgrad.preconditioner.arguments import check_dense
from natgrad.preconditioner.explanation import Explanation
from natgrad.preconditioner.gradients.norms import gradient_norms
from natgrad.preconditioner.membership import Group, Membership, decayed
from natgrad.schedule import check_number


class PreconditionedOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` that preconditions and then steps, with the inner optimizer's groups and state.

    A step is skipped on all ranks if the gradient of any parameter is not finite: no parameter, factor or momentum
    changes. The first such step warns, ``metrics()["skipped_steps"]`` counts them, and `natgrad.Guard` limits how many
    may follow each other. On an accelerator, where the host does not know, an optimizer of torch that is not fused
    takes a step with gradients of zero instead.

    Attributes:
        optimizer: The inner optimizer.
        preconditioner: The preconditioner.
        clip_norm: The largest norm of all gradients. None: any.
    """

    @with_suggestions
    def __init__(self, optimizer: Optimizer, preconditioner: Preconditioner, *, clip_norm: float | None = None) -> None:
        """Combine any optimizer with the preconditioner of the same model.

        Args:
            optimizer: The optimizer.
            preconditioner: The preconditioner.
            clip_norm: The largest norm of all gradients after preconditioning, to which they are scaled down. None:
                any.

        Raises:
            ValueError: if either has a wrong type, or they belong to different models.
        """
        fits = isinstance(optimizer, Optimizer) and not isinstance(optimizer, torch.optim.LBFGS)
        allowed = "a torch.optim.Optimizer that steps without a closure"
        require(fits, "optimizer", type(optimizer).__name__, allowed)
        fits = isinstance(preconditioner, Preconditioner)
        require(fits, "preconditioner", type(preconditioner).__name__, "a natgrad.Preconditioner")
        known = preconditioner.optimizer
        allowed = "the one that the preconditioner was given, and reads the learning rate of"
        require(known is None or known is optimizer, "optimizer", repr(optimizer), allowed)
        covered = {id(parameter) for parameter in preconditioner.parameters()}
        fits = any(id(parameter) in covered for group in optimizer.param_groups for parameter in group["params"])
        require(fits or not covered, "optimizer", repr(optimizer), "one of the preconditioner's model")
        if clip_norm is not None:
            check_number("clip_norm", clip_norm, "a number above 0, or None", minimum=0, strict=True)
            check_dense(preconditioner._structure.root, "clip_norm", clip_norm, "the norm of all gradients")
            clip_norm = float(clip_norm)
        self.optimizer, self.preconditioner, self.clip_norm = optimizer, preconditioner, clip_norm
        self._count: Count | None = None
        self._warned_of_incomplete = self._lacks_curvature = self._has_moved = False
        self._splits_by_decay = False  # whether the second group is of what is not decayed
        self._membership = preconditioner.membership or Membership(preconditioner._structure.root, optimizer)
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()
        for moment in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
            name = f"_optimizer_{moment}_hooks"
            setattr(self, name, getattr(optimizer, name))
        self._patch_step_function()

    # Groups, state and the hooks on it are those of the inner optimizer, also after it has loaded a checkpoint.

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

    @property
    def count(self) -> Count | None:
        """The count of `natgrad.Preconditioner.step` for token losses with masks, if the trainer cannot pass it.

        "auto" stays. A number is that of the positions on this rank that count since the last step; `step` and
        `zero_grad` reset it.
        """
        return self._count

    @count.setter
    def count(self, count: Count | None) -> None:
        if "auto" in (count, self._count):
            self.preconditioner._expect_count(count)
        self._count = count

    def _reset_count(self) -> None:
        """Reset the count, unless it is "auto"."""
        self.count = "auto" if self._count == "auto" else None

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        count: Count | None = None,
    ) -> Any:
        """Evaluate `closure`, if given, replace ``.grad`` by the natural gradient, and step.

        Args:
            closure: Follows torch's convention: clears the gradients, runs forward and backward passes and returns the
                loss.
            count: The count of `natgrad.Preconditioner.step`. None: the attribute of this name.

        Returns:
            The value that `closure` returned.

        Raises:
            ValueError: as `natgrad.Preconditioner.step`, or if there is a ``GradScaler`` and natgrad averages the
                gradients of several ranks. Nothing has been changed then.
            CurvatureError: as `natgrad.Preconditioner.step`, or if as many steps in a row were skipped as
                `natgrad.Guard` says.

        Warns:
            NatgradWarning: once, if a step is skipped.
        """
        self._begin_step()
        self._check_scaler()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._read_groups()
        skips = None
        if not self._is_loaders_step():
            self._warn_of_missing_curvature()
            skips = self.preconditioner._skips = self._find_skipped_step()
            try:
                self._precondition(self.count if count is None else count)
            finally:
                self.preconditioner._skips = None
            self._reset_count()
        self._regroup()
        # The host waits for the first one: torch's fused SGD leaves its momentum uninitialised if that is skipped.
        if skips is None or self._has_moved or not bool(skips):
            self._move(skips if self._has_moved else None)
            self._has_moved = True
        return loss

    def _begin_step(self) -> None:
        """Do what must precede a step. In a subclass with a `step` of its own torch's hooks would run twice."""

    def _move(self, skips: Tensor | None) -> None:
        """Let the inner optimizer step, as `step_unless`."""
        step_unless(skips, self.optimizer, self.optimizer.step)

    def _check_scaler(self) -> None:
        """Check that a ``GradScaler`` calls `step` on all ranks or on none: it decides by the gradients of each."""
        preconditioner = self.preconditioner
        scaling, allowed = preconditioner._scaling, "'averaged' with a GradScaler, or a Preconditioner of its own"
        fits = not (scaling.reduces and scaling.skips and preconditioner._communicator.ranks > 1)
        require(fits, "gradients", "reduce", allowed)

    @torch.no_grad()
    def _find_skipped_step(self) -> Tensor | None:
        """Return whether the gradient of any parameter on any rank is not finite (bool). None: all are, as known.

        The ranks send one number for each parameter if each has gradients of its own.
        """
        preconditioner = self.preconditioner
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norms = gradient_norms(parameters)
        runtime, reduces = preconditioner._communicator, preconditioner._scaling.reduces
        runtime.call = f"step() {preconditioner._progress.step}"
        if runtime.ranks > 1 and (reduces or any(map(is_sharded, parameters))):
            found = (~norms.isfinite()).float()
            runtime.sum_(found, "counters")
            unusable: Tensor | None = found > 0
        else:
            unusable = None if known_between(norms) else ~norms.isfinite()

        known = self._membership.parameters  # not `self`, which what keeps the counters would then keep

        def name_of(place: int) -> str:
            names = (name for name, parameter in known.items() if parameter is parameters[place])
            return next(names, f"parameter {place}")

        return preconditioner._failures.count_skipped_step(unusable, name_of)

    def _warn_of_missing_curvature(self) -> None:
        """Warn if the optimizer's state was loaded without the preconditioner's."""
        if self._lacks_curvature and not self.preconditioner.has_curvature:
            warn(
                "natgrad: the loaded optimizer state came without the preconditioner's, whose curvature starts anew: "
                "to resume it, save and load the preconditioner, too",
                "state-without-curvature",
            )
        self._lacks_curvature = False

    def _precondition(self, count: Count | None) -> None:
        self.preconditioner.step(count)
        self._clip()

    def _clip(self) -> None:
        """Scale all gradients down to `clip_norm`, unless one is not finite. The host does not wait for the norm."""
        if self.clip_norm is None:
            return
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not gradients:
            return
        parts = [[g for g in gradients if is_sharded(g) == sharded] for sharded in (False, True)]
        norm = get_total_norm([whole(get_total_norm(part)) for part in parts if part])
        factor = torch.where(norm.isfinite(), (self.clip_norm / norm).clamp(max=1.0), 1.0)
        torch._foreach_mul_([local(gradient) for gradient in gradients], factor)

    def _read_groups(self) -> None:
        """Bring the groups and the model together, before the step."""
        self._membership.follow(self._group_for)

    def _group_for(self, parameter: torch.nn.Parameter) -> Group | None:
        """Return the group for a parameter that the model got later. None: there are several."""
        if self._splits_by_decay and len(self.param_groups) == 2:
            return self.param_groups[id(parameter) not in decayed(self.preconditioner._structure.root)]
        return self.param_groups[0] if len(self.param_groups) == 1 else None

    def _regroup(self) -> None:
        """Put parameters into another group, if the change of a layer demands it."""

    def _is_loaders_step(self) -> bool:
        """Return whether ``torch.distributed.checkpoint`` takes this step to initialise the optimizer's state.

        Such a step has a learning rate of zero, new gradients of zero and no backward pass. One rank may take it alone,
        so nothing is sent; in a training step all ranks decide alike, because state, learning rates and averaged
        gradients are equal, and because the hooks see every backward pass whose gradients natgrad has yet to average.
        """
        preconditioner = self.preconditioner
        if self.state or not preconditioner._capture.idle or preconditioner.call_order.written.remain():
            return False
        if any(float(group["lr"]) for group in self.param_groups if "lr" in group):
            return False
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return bool(gradients) and not any(bool(gradient.any()) for gradient in gradients)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and forget the statistics of their backward passes."""
        self._read_groups()  # ``to_empty`` gives new parameters, and these gradients that nothing has set
        self._reset_count()
        self.preconditioner._capture.discard()
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Return the inner optimizer's state, with that of the preconditioner under "preconditioner".

        ``torch.distributed.checkpoint.state_dict`` only keeps the former: save the preconditioner beside it.

        Args:
            gather: Collect the curvature of all ranks (collective), so that one rank can save all of it. Otherwise the
                state only contains the layers that this rank is a worker of and, with deferred sums, what this rank has
                seen since the last decompositions, unless `consolidate_state_dict` has been called since the last step.

        Warns:
            NatgradWarning: once, if this rank's state is incomplete.
        """
        self._read_groups()
        preconditioner = self.preconditioner
        curvature, plan = preconditioner.state_dict(gather=gather), preconditioner.plan
        if plan.columns > 1 and not (gather or preconditioner.is_complete or self._warned_of_incomplete):
            self._warned_of_incomplete = True
            warn(
                f"natgrad: under placement '{plan.placement}' this state is incomplete: it holds the curvature of this "
                f"rank's layers only, and the file of one rank cannot resume all {plan.ranks}. Call "
                "consolidate_state_dict() on every rank before. Inside a trainer pass placement='comm-opt', or do what "
                "https://natgrad.github.io/natgrad/integrations/ says of this trainer. (torch.distributed.checkpoint "
                "takes the optimizer's part alone, which is complete: save the preconditioner with it)",
                "incomplete-state",
            )
        return {**self.optimizer.state_dict(), "preconditioner": curvature}

    def consolidate_state_dict(self) -> None:
        """Collect the curvature of all ranks, as `Preconditioner.consolidate_state_dict`.

        Lightning calls this method by itself, as that of ``torch.distributed.optim.ZeroRedundancyOptimizer``.
        """
        self._read_groups()
        self.preconditioner.consolidate_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both states. Without a "preconditioner" the preconditioner stays unchanged.

        Call it on every rank. The next step warns if the preconditioner's state is missing and has not been loaded by
        itself either.

        Raises:
            ValueError: if either state has unknown entries or wrong shapes, as in the file of one rank if each layer
                has one worker, or factors are not what `Preconditioner.load_state_dict` accepts. Nothing has been
                changed then.
        """
        self._read_groups()
        fits = isinstance(state_dict, Mapping) and state_dict.keys() >= {"state", "param_groups"}
        found = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        require(fits, "state_dict", found, "what PreconditionedOptimizer.state_dict() returned")
        sizes, wanted = _group_sizes(state_dict), _group_sizes(self.optimizer.state_dict())
        allowed = (
            f"{wanted} parameters by group: the state is of another optimizer or model, or of another decay=. After a "
            "change of optimizer load the model's state alone"
        )
        require(sizes == wanted, "state_dict['param_groups']", sizes, allowed)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            lacking = sorted(set(self.defaults) & group.keys() - saved.keys())
            owner = type(self.optimizer if type(self) is PreconditionedOptimizer else self).__name__
            allowed = f"those of {owner}, with {', '.join(lacking)}"
            require(not lacking, "state_dict['param_groups']", sorted(saved.keys() - {"params"}), allowed)
        inner = {key: value for key, value in state_dict.items() if key != "preconditioner"}
        if "preconditioner" in state_dict:
            self.preconditioner.load_state_dict(state_dict["preconditioner"])
        self.optimizer.load_state_dict(inner)
        self._lacks_curvature = "preconditioner" not in state_dict

    def explain(self, full: bool = False) -> Explanation:
        """Return what `natgrad.Preconditioner.explain` does, with the optimizer that moves what is left out."""
        return self.preconditioner._explain(full, mover=self._mover)

    def metrics(self) -> dict[str, float | Tensor]:
        """Return the numbers of `natgrad.Preconditioner.metrics`."""
        return self.preconditioner.metrics()

    @property
    def _mover(self) -> str:
        """What moves the parameters without curvature."""
        return type(self.optimizer).__name__

    def __reduce__(self) -> NoReturn:
        """Refuse to copy: the hooks of the copy would be those of the original."""
        message = (
            f"a {type(self).__name__} is neither copied nor pickled: build one for the copy of the model, and load "
            "its state_dict(gather=True)"
        )
        raise TypeError(with_address(message, "order-of-calls"))

    def __repr__(self) -> str:
        return f"PreconditionedOptimizer({self.optimizer!r}, {self.preconditioner!r})"


def step_unless(skips: Tensor | None, optimizer: Optimizer, step: Callable[[], Any]) -> None:
    """Call the `step` of an optimizer unless it `skips` this step (bool; None: it does not).

    The host does not wait for an accelerator.
    """
    if skips is not None and on_host(skips):
        return
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    if skips is not None and fused:  # as by torch's GradScaler
        optimizer.found_inf = skips.float()  # type: ignore[attr-defined]
    elif skips is not None:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.grad is not None:
                local(parameter.grad).masked_fill_(skips.to(parameter.device), 0)
    try:
        step()
    finally:
        vars(optimizer).pop("found_inf", None)


def _group_sizes(state: object) -> list[int] | None:
    """Return the number of parameters in each group of an optimizer's state. None: not such a state."""
    try:
        return [len(group["params"]) for group in state["param_groups"]]  # type: ignore[index]
    except (KeyError, TypeError):
        return None
