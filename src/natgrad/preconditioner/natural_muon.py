"""Natural Muon as one optimizer for a whole model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from glob import escape
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parameter import is_lazy
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from natgrad.capture.counts import Count
from natgrad.capture.hooks import Hooks
from natgrad.curvature import Curvature, Spectral
from natgrad.damping import Damping
from natgrad.distributed import Placement
from natgrad.distributed.fsdp import find_mesh, is_sharded, local
from natgrad.errors import ArgumentError, did_you_mean, require, require_one_of, warn, with_suggestions
from natgrad.layers import layers_for
from natgrad.linalg.device import multiplies_bfloat16
from natgrad.linalg.precision import Precision, at_least_float32
from natgrad.preconditioner.arguments import check_dense, check_unscripted, unwrap
from natgrad.preconditioner.coverage import Place, cover, excluded_by, places, tied_to, unfrozen
from natgrad.preconditioner.explanation import Explanation
from natgrad.preconditioner.gradients.arrivals import Arrivals
from natgrad.preconditioner.guard.guard import Guard
from natgrad.preconditioner.membership import Group, decayed
from natgrad.preconditioner.optimizer import PreconditionedOptimizer, step_unless
from natgrad.preconditioner.preconditioner import Preconditioner
from natgrad.refresh import DoublingInterval, Refresh, RefreshRule
from natgrad.schedule import check_number, is_number

_WITH_MODEL = (
    "an nn.Module, not its parameters; for trainers that pass these: https://natgrad.github.io/natgrad/integrations/"
)

# The steps over which the roots of a refresh are spread.
_SPREAD = 8


class NaturalMuon(PreconditionedOptimizer):
    """Muon in the coordinates of K-FAC's factors, for a whole model (`natgrad.Spectral`).

    Weight matrices of linear layers, convolutions and attention move by natgrad's update, all other parameters
    (embeddings, norms, biases, and those that no layer type covers) by AdamW with Nesterov momentum (Dozat 2016) at the
    same learning rate. The update has the size of Adam's, so that one learning rate suits both.

    ``param_groups[0]`` holds the matrices, ``param_groups[1]`` the other parameters, frozen ones included: they train
    once they are thawed. ``explain()`` shows which is which, and why.

    Examples:
        >>> optimizer = natgrad.NaturalMuon(model, lr=2e-2)
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad()
        ...     criterion(model(inputs), targets).backward()
        ...     optimizer.step()
    """

    @with_suggestions
    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 2e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        power: float = 0.25,
        damping: Damping = 1e-2,
        interval: int = 100,
        *,
        steps: int | None = 4,
        full_factors: bool = False,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        decay: Literal["all", "matrices"] = "all",
        head: Literal["spectral", "adamw"] | Spectral = "adamw",
        heads: Sequence[str] | None = None,
        adamw: Sequence[str] = (),
        groups: Mapping[str, int] | None = None,
        dtype: torch.dtype | str | None = "auto",
        refresh: RefreshRule | str | None = None,
        placement: str | Placement = "auto",
        precision: Precision | torch.dtype | str | None = None,
        process_group: dist.ProcessGroup | None = None,
        mesh: Any = None,
        guard: Guard | None = None,
        gradients: Literal["auto", "averaged", "reduce"] = "auto",
        accumulation: Literal["mean", "sum"] = "mean",
        scaler: torch.amp.GradScaler | None = None,
        clip_norm: float | None = None,
        overlap: bool = False,
    ) -> None:
        """Attach hooks to the layers of `model`.

        Args:
            model: The model: plain, in ``DistributedDataParallel``, or sharded by FSDP2 (``fully_shard``) beforehand.
            lr: The learning rate, a number or a tensor with one. Start at 2e-2, and try twice and half of it.
            momentum: μ of the matrices, in [0, 1). ``group["momentum"]`` of their group changes it later, and so does
                the first of its ``betas``, which some schedulers set.
            weight_decay: Decoupled weight decay, times the learning rate. Set it in a parameter group to change it for
                that group.
            power: p, the exponent of the inverse roots, in [0, 1]; 0 is Muon.
            damping: δ, relative to the mean eigenvalue of each factor: a number above 0, or a callable of the step.
            interval: Steps between two refreshes of factors and roots. Early refreshes come at steps 0, 1, 2, 4, 8...
                (`natgrad.DoublingInterval`). The roots of the layers are computed in up to 8 steps from then on, some
                in each, so that no step takes much longer than others.
            steps: Newton-Schulz steps of the polar factor (`natgrad.Spectral`).
            full_factors: Whether long sides and convolutions of more than 256 columns have whole factors too
                (`natgrad.Spectral`).
            betas: β₁ and β₂ of AdamW. From a parameter's second step on β₁ m + (1 - β₁) g is in place of its moment m.
            eps: ε of AdamW.
            decay: Which parameters `weight_decay` is for: "all", or "matrices": no biases, norms, embeddings and what
                the names from ``model.no_weight_decay()`` stand for, which then have a group of their own.
            head: What moves the layer nearest to the loss: "adamw", "spectral" as all others, or another
                `natgrad.Spectral`, such as ``natgrad.Spectral(power=0.25, steps=0)``.
            heads: The fnmatch patterns of the names of these layers. None: the layer that shares its weight with an
                embedding or, without one, the last layer with a weight matrix in the order of
                ``model.named_modules()``. In the first forward pass there is a warning with the names to pass if the
                autograd graph shows other heads.
            adamw: The fnmatch patterns of the names of layers that AdamW moves.
            groups: For fnmatch patterns of names of layers, the number of their equal groups of outputs that are
                matrices of their own: ``{"*.qkv": 3}`` for queries, keys and values that one layer computes.
            dtype: That of the update's products (`natgrad.Spectral`). "auto": ``torch.bfloat16`` on GPUs and CPUs with
                instructions for it, unless the model is in float64 or `steps` is None; otherwise None.
            refresh: A rule in place of `interval`.
            placement: As of `natgrad.Preconditioner`, like all that follow.
            precision: The dtypes of factors, messages and solves.
            process_group: The ranks, if the model has no wrapper that determines them.
            mesh: A one-dimensional ``DeviceMesh`` instead of `process_group`, or the mesh of FSDP2.
            guard: How natgrad reacts to numerical failures.
            gradients: "averaged": ``.grad`` is averaged over the ranks already, by a wrapper. "reduce": natgrad
                averages it. "auto" is "averaged", except in ``DistributedDataParallel`` over several nodes (more ranks
                than ``LOCAL_WORLD_SIZE``, which torchrun sets): if nothing changes ``.grad`` between the backward pass
                and `step` in the first two steps, natgrad averages from then on, as DDP does, but sends each gradient
                to one rank only. Until `step` ``.grad`` is then that of this rank's samples: pass "averaged" if
                anything reads it before. Not with `scaler`, `clip_norm`, a `placement` or a communication hook of your
                own. Call ``preconditioner.detach()`` before another optimizer trains the model.
            accumulation: With K backward passes per step, whether the loss is divided by K ("mean") or not ("sum").
            scaler: The ``GradScaler`` that scales the loss.
            clip_norm: The largest norm of all gradients, which are scaled down to it before anything else. None: any.
            overlap: With ``gradients="reduce"``, whether matrices that other ranks update may arrive while the next
                forward pass runs, so that ``.grad`` does not hold the update: see `finish`. Not for compiled models,
                whose graphs would break.

        Raises:
            ValueError: if an argument is not allowed, or the model has no weight matrix for natural Muon. The model is
                unchanged then.

        Warns:
            NatgradWarning: in the first forward pass, if other layers than the one taken for the head are nearest to
                the loss.
        """
        require(isinstance(model, nn.Module), "model", type(model).__name__, _WITH_MODEL)
        lr, weight_decay, eps = _numbers(lr=lr, weight_decay=weight_decay, eps=eps)
        check_number("interval", interval, "a number of steps >= 1", minimum=1)
        _check_options(betas, decay, clip_norm, gradients, overlap)
        _check_patterns(head, heads, adamw, groups)
        root = unwrap(model)
        _check_modules(root)
        trained = matrices_of(root, covered=False)
        with unfrozen(root):
            every, candidates = matrices_of(root), matrices_of(root, covered=False)
        require(every, "model", type(model).__name__, "a model with linear layers or convolutions")
        _check_dtype(dtype)
        if dtype == "auto":
            dtype = torch.bfloat16 if steps is not None and _gains_from_bfloat16(root) else None

        options: dict[str, Any] = {"power": power, "steps": steps, "momentum": momentum}
        spectral = partial(Spectral, **options, dtype=dtype, full_factors=full_factors)
        curvature: dict[str, Curvature | None] = dict.fromkeys(adamw)
        if head != "spectral":
            moved_by = head if isinstance(head, Spectral) else None
            likely = [likely_head(root, _beside_trained(candidates) or candidates)]
            likely = [name for name in likely if _first_match(name, adamw) is None]
            found = [escape(name) for name in likely if name in every]
            _add(curvature, dict.fromkeys(found if heads is None else heads, moved_by))
        _add(curvature, {pattern: spectral(groups=count) for pattern, count in (groups or {}).items()})
        if any(_first_match(name, curvature) is None for name in every):
            _add(curvature, {"*": spectral()})
        by_adamw = [name for name in every if curvature[str(_first_match(name, curvature))] is None]
        allowed = f"a model with more matrices than {', '.join(filter(None, by_adamw)) or 'its only one'}"
        require(len(by_adamw) < len(every), "model", type(model).__name__, f"{allowed}, which AdamW moves (see head=)")
        rule = DoublingInterval(interval)
        preconditioner = Preconditioner(
            model,
            curvature,
            damping=damping,
            kl_clip=None,
            refresh=Refresh(factors=rule, inverses=rule, spread=_SPREAD) if refresh is None else refresh,
            reduction="mean",
            placement=placement,
            precision=precision,
            process_group=process_group,
            mesh=mesh,
            guard=guard,
            gradients="averaged" if gradients == "auto" and clip_norm is not None else gradients,
            accumulation=accumulation,
            scaler=scaler,
        )
        with unfrozen(root):
            slots = [slot for layer, _ in cover(root, curvature).layers for slot in layer.slots]
            covered = {id(slot.parameter): slot.parameter for slot in slots}  # attention's appears thrice
            if not covered:
                preconditioner.detach()
            require(covered, "model", type(model).__name__, "a model with a weight matrix that is not too wide")
            others = [p for p in model.parameters() if p.requires_grad and id(p) not in covered]
        undecayed = {id(p) for p in others} - decayed(root) if decay == "matrices" else set()
        parts = [[p for p in others if (id(p) in undecayed) == apart] for apart in (False, True)]
        update = _Update(
            list(covered.values()),
            *parts,
            arrivals=preconditioner._begin_arrivals(self) if overlap else None,
            lr=lr,
            weight_decay=weight_decay,
            betas=tuple(betas),
            eps=eps,
        )
        self._spectral = [one for one in curvature.values() if isinstance(one, Spectral) and one is not head]
        self._momentum, self._decay = float(momentum), decay
        self._reasons = _head_reasons(every, curvature, found, heads) if head == "adamw" else {}
        super().__init__(update, preconditioner, clip_norm=clip_norm)
        self._read_momentum()
        self._coverage = preconditioner._structure.coverage
        # FSDP2's graphs have other parameters, and a frozen head is in no graph.
        if head != "spectral" and heads is None and find_mesh(model) is None and trained.keys() >= set(likely):
            _compare_heads(preconditioner._hooks, trained, likely, self._reasons)

    def __repr__(self) -> str:
        groups = repr(self.optimizer).replace(type(self.optimizer).__name__, "NaturalMuon", 1).removesuffix(")")
        return f"{groups}{self.preconditioner!r}\n)"  # as torch writes it

    @override
    def explain(self, full: bool = False) -> Explanation:
        """Return what `natgrad.Preconditioner.explain` does, with AdamW as what moves the rest."""
        found = super().explain(full)
        found.rows = [
            replace(
                row,
                curvature=_by_its_name(row.curvature),
                reason=self._reasons.get(row.reason, _by_its_name(row.reason)),
            )
            for row in found.rows
        ]
        return found

    @property
    @override
    def _mover(self) -> str:
        return "AdamW"

    def _matrices(self) -> set[int]:
        """Return the ids of all parameters that natural Muon moves, also those that are frozen."""
        root = self.preconditioner._structure.root
        with unfrozen(root):
            layers = cover(root, self.preconditioner.curvature).layers
            return {id(slot.parameter) for layer, _ in layers for slot in layer.slots}

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices that natural Muon moves, or of parameters that AdamW moves.

        Raises:
            ValueError: if it has both, an option that is the same for all groups, or maximize=True. Nothing has been
                changed then.
        """
        for name in param_group.keys() & _SAME_IN_ALL_GROUPS:
            allowed = "left out: it is the same for all groups"
            raise ArgumentError(f"param_group[{name!r}]", param_group[name], allowed)
        _check_direction("param_group", param_group)
        params = param_group.get("params", ())
        parameters = [params] if isinstance(params, Tensor) else list(params)
        matrices = self._matrices()
        kinds = {id(parameter) in matrices for parameter in parameters}
        allowed = "either matrices that natural Muon moves, or parameters that AdamW moves"
        require(len(kinds) == 1, "param_group['params']", f"{len(parameters)} parameters", allowed)
        own = {"momentum": self._momentum} if True in kinds else {}
        super().add_param_group({**own, **param_group, "params": parameters, "spectral": kinds.pop()})

    @override
    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        self.finish()  # for the counters of failures
        return super().state_dict(gather=gather)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.finish()
        super().load_state_dict(state_dict)

    @override
    def metrics(self) -> dict[str, float | Tensor]:
        self.finish()
        return super().metrics()

    @override
    def _begin_step(self) -> None:
        self.finish()

    def finish(self) -> None:
        """Wait for the updates of the last step, with ``overlap=True``.

        The model's forward passes, ``state_dict`` and ``load_state_dict`` do it by themselves. Call it before anything
        else reads or changes parameters, such as a copy of the model or an average of weights.
        """
        if self.preconditioner._arrivals is not None:
            self.preconditioner._arrivals.finish()

    @override
    def _precondition(self, count: Count | None) -> None:
        if self.clip_norm is not None:
            self.preconditioner._check_step(count)  # before the gradients change
            self._clip()
        self.preconditioner.step(count)

    @override
    def _move(self, skips: Tensor | None) -> None:
        assert isinstance(self.optimizer, _Update)
        step_unless(skips, self.optimizer, self.optimizer.move)

    @override
    def _read_groups(self) -> None:
        super()._read_groups()
        for group in self.param_groups:
            _check_direction("group", group)
        self._read_momentum()

    def _read_momentum(self) -> None:
        """Read the momentum of the groups of matrices: "momentum" or the first of "betas", whichever has been set.

        Raises:
            ValueError: if it is not allowed, or differs between groups of matrices.
        """
        groups, found = [group for group in self.param_groups if group["spectral"]], set[float]()
        if all(group.get("momentum") == group["betas"][0] == self._momentum for group in groups):
            return
        for group in groups:
            beta, known = group["betas"][0], group.get("momentum")  # old checkpoints have none
            found.add(self._momentum if known is None else known if beta == self._momentum else beta)
        require(len(found) == 1, "momentum", sorted(found), "the same in all groups of matrices")
        momentum = found.pop()
        require(is_number(momentum) and 0 <= momentum < 1, "momentum", momentum, "a number in [0, 1)")
        self._momentum = momentum
        for one in self._spectral:
            for variant in (one, *one._variants.values()):
                variant.momentum = momentum
        for group in groups:
            group["momentum"], group["betas"] = momentum, (momentum, *group["betas"][1:])

    @override
    def _group_for(self, parameter: nn.Parameter) -> Group | None:
        spectral = id(parameter) in self._matrices()
        groups = [group for group in self.param_groups if group["spectral"] == spectral]
        if self._decay == "matrices" and not spectral:
            decays = id(parameter) in decayed(self.preconditioner._structure.root)
            groups = groups[:1] if decays else groups[1:] or groups
        return next(iter(groups), None)

    @override
    def _regroup(self) -> None:
        coverage = self.preconditioner._structure.coverage
        if coverage is self._coverage:
            return
        self._coverage, matrices = coverage, self._matrices()
        for group in self.param_groups:
            misplaced = [parameter for parameter in group["params"] if (id(parameter) in matrices) != group["spectral"]]
            for parameter in misplaced:
                group["params"] = [other for other in group["params"] if other is not parameter]
                self.state.pop(parameter, None)
                target = self._group_for(parameter)
                assert target is not None  # the constructor makes both
                target["params"].append(parameter)


# Arguments that are the same for all groups.
_SAME_IN_ALL_GROUPS = {"power", "damping", "interval", "steps", "full_factors", "decay", "head", "heads", "adamw"}
_SAME_IN_ALL_GROUPS |= {"groups", "dtype", "refresh", "placement", "precision", "gradients", "accumulation", "scaler"}


def _by_its_name(text: str) -> str:
    """Return a text that begins with "Spectral", as of its ``repr``, with the name that users of natural Muon know."""
    return f"natural Muon{text.removeprefix('Spectral')}" if text.startswith("Spectral") else text


def _numbers(**numbers: float | Tensor) -> Iterator[Any]:
    """Check that some numbers, or tensors with one, are at least 0, and yield them as floats, or the tensors."""
    for name, given in numbers.items():
        value = given.item() if isinstance(given, Tensor) and given.numel() == 1 else given
        check_number(name, value, "a number >= 0", minimum=0)
        yield given if isinstance(given, Tensor) else float(given)


def _check_modules(model: nn.Module) -> None:
    """Check that the model has its parameters and can have hooks, and that AdamW can move its embeddings."""
    check_unscripted(model)
    lazy = [
        name
        for name, module in model.named_modules()
        if any(is_lazy(parameter) for parameter in module._parameters.values() if parameter is not None)
    ]
    allowed = f"called once before, so that {', '.join(map(repr, lazy))} get their parameters"
    require(not lazy, "model", type(model).__name__, allowed)
    check_dense(model, "model", type(model).__name__, "AdamW, which moves embeddings,")


def _check_options(betas: object, decay: object, clip_norm: object, gradients: str, overlap: object) -> None:
    """Check options that only natural Muon has."""
    fits = isinstance(betas, Sequence) and len(betas) == 2 and all(is_number(one) and 0 <= one < 1 for one in betas)
    require(fits, "betas", betas, "two numbers in [0, 1)")
    require_one_of("decay", decay, "all", "matrices")
    allowed = "None with gradients='reduce': the norm of averaged gradients is known too late"
    require(clip_norm is None or gradients != "reduce", "clip_norm", clip_norm, allowed)
    require(isinstance(overlap, bool), "overlap", overlap, "True or False")
    require(not overlap or gradients == "reduce", "overlap", overlap, "False, unless gradients='reduce'")


def _check_direction(name: str, group: Mapping[str, Any]) -> None:
    """Check that a group's parameters move against the gradient: AdamW alone would move them along it."""
    maximizes = group.get("maximize", False)
    require(not maximizes, f"{name}['maximize']", maximizes, "False: natural Muon minimizes; negate the loss")


def _check_dtype(dtype: object) -> None:
    """Check the dtype of the update's products."""
    fits = dtype in ("auto", None, "bfloat16", torch.bfloat16)
    require(fits, "dtype", dtype, "'auto', None or torch.bfloat16", did_you_mean(dtype, ("auto", "bfloat16")))


def _check_patterns(head: object, heads: Any, adamw: Any, groups: Any) -> None:
    """Check which layers are moved by what."""
    fits = isinstance(head, Spectral) or (isinstance(head, str) and head in ("spectral", "adamw"))
    near = did_you_mean(head, ("spectral", "adamw"))
    require(fits, "head", head, "'spectral', 'adamw' or a natgrad.Spectral", near)
    for name, patterns in (("heads", () if heads is None else heads), ("adamw", adamw)):
        is_sequence = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        fits = is_sequence and all(isinstance(pattern, str) for pattern in patterns)
        require(fits, name, patterns, "a sequence of fnmatch patterns, such as ['head']")
    fits = groups is None or (isinstance(groups, Mapping) and all(isinstance(name, str) for name in groups))
    require(fits, "groups", groups, "a mapping from fnmatch patterns to numbers")


class _Update(Optimizer):
    """Moves matrices against natgrad's updates, and other parameters by AdamW with Nesterov momentum.

    Attributes:
        found_inf: As of torch's fused optimizers: 1.0 on the device if the step is to change nothing.
        arrivals: The updates that arrive later, and move their matrices then. None: all are in ``.grad``.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None
    arrivals: Arrivals | None = None

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[nn.Parameter],
        undecayed: list[nn.Parameter],
        *,
        arrivals: Arrivals | None,
        **options: Any,
    ) -> None:
        """Make a group of each, of the last only if there are any; `options` are those of AdamW."""
        self.arrivals = arrivals
        defaults = AdamW([*matrices, *others, *undecayed], **options).defaults
        groups: list[Group] = [{"params": matrices, "spectral": True}, {"params": others}]
        if undecayed:
            groups.append({"params": undecayed, "weight_decay": 0.0})
        super().__init__(groups, {**defaults, "spectral": False})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step after the `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.move()
        return loss

    @torch.no_grad()
    def move(self) -> None:
        """Take a step without the hooks that torch adds to `step`: those of `NaturalMuon.step` have run.

        ``.grad`` of matrices holds natgrad's update, unless that arrives later.
        """
        self._follow_dtypes()
        for group in (group for group in self.param_groups if group["spectral"]):
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            if group["weight_decay"]:
                shards, decay = list(map(local, parameters)), group["lr"] * group["weight_decay"]
                if self.found_inf is not None:
                    decay = decay * (1 - self.found_inf.to(at_least_float32(shards[0].dtype)))
                torch._foreach_mul_(shards, 1 - decay)
            for parameter in parameters:  # what loads checkpoints expects a state of each parameter that has moved
                if parameter not in self.state:
                    self.state[parameter]["step"] = torch.zeros(())
            if self.arrivals is not None and self.arrivals.remain:
                self.arrivals.move_by(dict.fromkeys(map(id, parameters), -group["lr"]))
            else:
                torch._foreach_add_(parameters, [parameter.grad for parameter in parameters], alpha=-group["lr"])
        self._step_others()

    def _step_others(self) -> None:
        """Move the other parameters by AdamW with β₁ m + (1 - β₁) g in place of m (Nesterov momentum, Dozat 2016).

        Add the gradient to the moment before AdamW does, and take the additional one out afterwards. The first step is
        AdamW's. The bias correction is AdamW's too, which makes the second step up to 1.43 times as long at β₁ = 0.9,
        and the tenth 1.05 times.
        A step that is skipped on an accelerator leaves the moments in ``.grad``, which nothing uses.
        """
        adamw, skips = self._by_adamw(), None if self.found_inf is None else self.found_inf > 0
        ahead = []
        for group in adamw.param_groups:
            beta = group["betas"][0]
            moved = [p for p in group["params"] if p.grad is not None and "exp_avg" in self.state.get(p, ())]
            moments, gradients = [local(self.state[p]["exp_avg"]) for p in moved], [local(p.grad) for p in moved]
            if skips is not None:  # then the moments stay as they are
                for moment, gradient in zip(moments, gradients, strict=True):
                    torch.where(skips.to(gradient.device), moment, gradient, out=gradient)
            if moved and beta:
                torch._foreach_lerp_(moments, gradients, 1 - beta)
                ahead.append((moments, gradients, 1 - 1 / beta))
        step_unless(skips, adamw, partial(inspect.unwrap(AdamW.step), adamw))  # without hooks, as `move`
        for moments, gradients, weight in ahead:
            torch._foreach_lerp_(moments, gradients, weight)

    def _follow_dtypes(self) -> None:
        """Give AdamW's moments the dtypes that their parameters have now, as loading a state does."""
        for parameter, state in self.state.items():
            for name, value in state.items():
                if name != "step" and isinstance(value, Tensor) and value.dtype != parameter.dtype:
                    state[name] = value.to(parameter.dtype)

    def _by_adamw(self) -> AdamW:
        """Return the AdamW of the other groups, with their state."""
        if "_adamw" not in self.__dict__:  # also in copies, which have groups and state alone
            self._adamw = AdamW([parameter for group in self.param_groups for parameter in group["params"]])
        others = (group for group in self.param_groups if not group["spectral"])
        # By itself torch never chooses the fused step, which on CPUs takes a fifth of the time for small parameters,
        # and alone can be skipped on an accelerator.
        groups = [{**group, "fused": True} if self._can_fuse(group) else group for group in others]
        self._adamw.param_groups, self._adamw.state = groups, self.state
        self._adamw._step_supports_amp_scaling = all(group["fused"] for group in groups)
        for parameter in (parameter for group in groups if group["fused"] for parameter in group["params"]):
            state = self.state.get(parameter, {})
            if "step" in state and state["step"].device != parameter.device:  # a loaded one may be on the host
                state["step"] = state["step"].to(parameter.device)
        return self._adamw

    def _can_fuse(self, group: Group) -> bool:
        """Return whether AdamW's fused step can move a group: it reads real elements in their order."""
        if group.get("fused") is not None or group["foreach"] or group["differentiable"]:
            return False
        for parameter in group["params"]:
            on_device = parameter.is_cuda or (parameter.is_cpu and not is_sharded(parameter))
            tensors = (parameter, parameter.grad, *self.state.get(parameter, {}).values())
            if not (on_device and parameter.is_floating_point() and all(map(_is_in_order, tensors))):
                return False
        return True


def _is_in_order(value: object) -> bool:
    """Return whether the elements of a value, if it is a tensor, lie in their order."""
    return not isinstance(value, Tensor) or (value.layout == torch.strided and value.is_contiguous())


def _head_reasons(
    matrices: Iterable[str],
    curvature: Mapping[str, Curvature | None],
    found: Sequence[str],
    heads: Sequence[str] | None,
) -> dict[str, str]:
    """Return what `explain` says of heads that AdamW moves, by the reason that the coverage has.

    `found`: the patterns of those that were found; `heads`: those of the user instead.
    """
    patterns, reason = (found, "nearest to the loss: head='adamw'") if heads is None else (heads, "head, by heads=")
    names = [name for name in matrices if _first_match(name, curvature) in patterns]
    tied = {tied_to([name]): f"tied to {name}, the head" for name in names}
    return dict.fromkeys(map(excluded_by, patterns), reason) | tied


def _compare_heads(hooks: Hooks, matrices: Mapping[str, Place], chosen: Sequence[str], reasons: dict[str, str]) -> None:
    """Compare the chosen heads with the graph of the first forward pass; others change the `reasons` of `explain`."""

    def compare(outputs: Any) -> None:
        hooks.on_outputs = None
        places = matrices.values()
        are_present = all(place.parent is None or place.module in place.parent.children() for place in places)
        if chosen and are_present:  # after a replacement, the head is found anew
            warn_of_other_heads(outputs, matrices, chosen, reasons)

    hooks.on_outputs = compare


def _beside_trained(matrices: Mapping[str, Place]) -> dict[str, Place]:
    """Return the matrices in modules with a trained parameter: a frozen teacher has no head of this model."""
    return {
        name: place
        for name, place in matrices.items()
        if place.parent is None or any(parameter.requires_grad for parameter in place.parent.parameters())
    }


def _gains_from_bfloat16(model: nn.Module) -> bool:
    """Return whether all parameters, none of them float64, are on devices that multiply bfloat16 fast."""
    parameters = list(model.parameters())
    fast = all(multiplies_bfloat16(device) for device in {parameter.device for parameter in parameters})
    return fast and all(parameter.dtype != torch.float64 for parameter in parameters)


def _add(curvature: dict[str, Curvature | None], others: Mapping[str, Curvature | None]) -> None:
    """Add `others` to a mapping from patterns; a ``ValueError`` if a pattern is there already."""
    for pattern, one in others.items():
        require(pattern not in curvature, "pattern", pattern, "given once, in one of adamw, heads and groups")
        curvature[pattern] = one


def _first_match(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first pattern that matches a name. None: none does."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def matrices_of(model: nn.Module, *, covered: bool = True) -> dict[str, Place]:
    """Return the places of modules with a trained weight matrix by name, in the order of ``model.named_modules()``.

    Without `covered` these include modules that no layer type covers, if they have no submodules.
    """
    found = {}
    for place in places(model):
        module = place.module
        layers = layers_for(place.name, module, place.parent) if module._parameters else []
        if isinstance(layers, str):
            is_leaf = not module._modules and not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            if not covered and is_leaf and any(p.ndim > 1 for p in _trained_parameters(module)):
                found[place.name] = place
        elif any(layer.form == "matrix" and layer.weight for layer in layers):
            found[place.name] = place
    return found


def _trained_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return the module's own trained parameters, except lazy ones."""
    return (p for p in module.parameters(recurse=False) if p.requires_grad and not is_lazy(p))


def likely_head(model: nn.Module, matrices: Mapping[str, Place]) -> str:
    """Return the name of the module that shares its weight with an embedding or, without one, of the last module."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tied = [name for name, place in matrices.items() if id(getattr(place.module, "weight", None)) in tables]
    return (tied or list(matrices))[-1]


def warn_of_other_heads(
    outputs: Any, matrices: Mapping[str, Place], chosen: Sequence[str], reasons: dict[str, str]
) -> None:
    """Warn if others than the `chosen` matrices are the first ones in the graphs of the model's outputs.

    A compiled graph, a functional head and checkpoints hide them; then nothing is compared.
    """
    names = {
        id(parameter): name
        for name, place in matrices.items()
        for parameter in place.module.parameters(recurse=False)
        if parameter.ndim > 1
    }
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    # Outputs from which others are computed, such as hidden states, but not logits beside their loss.
    inner = _below([leaf.grad_fn for leaf in leaves if leaf.ndim])
    leaves = [leaf for leaf in leaves if leaf.grad_fn not in inner]
    heads = list(dict.fromkeys(name for leaf in leaves if (name := _first_matrix(leaf.grad_fn, names)) is not None))
    if heads and set(heads) != set(chosen):
        reasons.update(dict.fromkeys(reasons, "taken for the head: see heads="))
        warn(
            f"natgrad: NaturalMuon has taken {', '.join(chosen)} for the layers nearest to the loss, but in the first "
            f"forward pass these were {', '.join(heads)}: pass heads={heads}",
            "heads",
        )


def _below(nodes: Sequence[Node | None]) -> set[Node]:
    """Return the nodes of the graph from which these are computed."""
    pending, seen = [node for node in nodes if node is not None], set[Node]()
    while pending:
        following = {inner for inner, _ in pending.pop().next_functions if inner is not None} - seen
        seen |= following
        pending += following
    return seen


def _first_matrix(node: Node | None, names: Mapping[int, str]) -> str | None:
    """Return the name of the nearest matrix before a node, breadth first. None: there is none, or several at once."""
    pending = [node]
    seen = {node}
    while pending:
        inputs = [following for each in pending if each is not None for following, _ in each.next_functions]
        pending = [each for each in dict.fromkeys(inputs) if each is not None and each not in seen]
        seen.update(pending)
        variables = (id(getattr(each, "variable", None)) for each in pending)
        found = {names[variable] for variable in variables if variable in names}
        if found:
            return found.pop() if len(found) == 1 else None
    return None
