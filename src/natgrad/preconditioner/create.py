"""One call that builds natural Muon, or an optimizer of torch beside a curvature, for a whole model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from natgrad.curvature import BY_NAME
from natgrad.errors import did_you_mean, require, require_one_of
from natgrad.preconditioner.arguments import unwrap
from natgrad.preconditioner.membership import decayed
from natgrad.preconditioner.natural_muon import NaturalMuon
from natgrad.preconditioner.optimizer import PreconditionedOptimizer
from natgrad.preconditioner.preconditioner import Preconditioner

# SparseAdam takes sparse gradients alone, Muon matrices alone, and LBFGS a closure that it calls again.
_EXCLUDED = {"Optimizer", "SparseAdam", "LBFGS", "Muon"}
_BASES: dict[str, type[Optimizer]] = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, Optimizer) and name not in _EXCLUDED
}
_OPTIONS = inspect.signature(Preconditioner.__init__).parameters.keys() - {"self", "model", "optimizer"}


def create_optimizer(
    model: nn.Module,
    name: str = "natural-muon",
    *,
    lr: float | None = None,
    weight_decay: float = 0.0,
    decay: Literal["all", "matrices"] = "matrices",
    clip_norm: float | None = None,
    **options: Any,
) -> PreconditionedOptimizer:
    """Build an optimizer that preconditions and steps, for trainers that take one ``torch.optim.Optimizer``.

    Args:
        model: The model, not its parameters: natgrad attaches hooks to its layers.
        name: "natural-muon", or an optimizer of torch and a curvature, such as "sgd+kfac", "adamw+kfac" or "sgd+hylo".
            Case, hyphens and underscores make no difference.
        lr: The learning rate. None: the default of the optimizer.
        weight_decay: As the optimizer applies it (decoupled for "natural-muon" and "adamw").
        decay: Which parameters `weight_decay` is for: "matrices", that is, no biases, norms and embeddings, nor what
            the model's ``no_weight_decay()`` names; these have a parameter group of their own. Or "all".
        clip_norm: The largest norm of the gradients (`natgrad.PreconditionedOptimizer`). None: any.
        **options: For "natural-muon" the other options of `natgrad.NaturalMuon`. Otherwise those of
            `natgrad.Preconditioner` and of the optimizer of torch. `curvature` replaces that of the name, as in
            ``curvature=natgrad.KFAC(form="inverse")``. `kl_clip` is None by default, except beside SGD. `reduction` is
            "auto" by default. With "auto" and "tokens" the attribute `count` of the result is "auto": only positions
            with a gradient that is not zero count, as if labels were masked elsewhere. Set it to None before the
            forward pass to count all.

    Returns:
        A `natgrad.NaturalMuon` or another `natgrad.PreconditionedOptimizer`, with the usual parameter groups.

    Raises:
        ValueError: if the name or an option is unknown, or a value is not allowed.

    Examples:
        >>> optimizer = natgrad.create_optimizer(model, "sgd+kfac", lr=0.1, momentum=0.9, weight_decay=5e-4)
    """
    allowed = "an nn.Module, not its parameters: natgrad attaches hooks to the layers, and finds the parameters itself"
    require(isinstance(model, nn.Module), "model", type(model).__name__, allowed)
    base, curvature = resolve_name(name)
    rate: dict[str, Any] = {} if lr is None else {"lr": lr}
    if curvature is None:
        _check_options(name, options, inspect.signature(NaturalMuon.__init__).parameters.keys() - {"self", "model"})
        return NaturalMuon(model, **rate, weight_decay=weight_decay, decay=decay, clip_norm=clip_norm, **options)
    require_one_of("decay", decay, "all", "matrices")
    known = inspect.signature(_BASES[base].__init__).parameters.keys() - {"self", "params"}
    require("weight_decay" in known or not weight_decay, "weight_decay", weight_decay, f"0, as {base} has none")
    _check_options(name, options, known | _OPTIONS)
    for_torch = {option: value for option, value in options.items() if option not in _OPTIONS}
    for_torch |= {"weight_decay": weight_decay} if "weight_decay" in known else {}
    parts = _parts(model, weight_decay, decay)
    groups: list[dict[str, Any]] = [{"params": parts[0]}, *({"params": one, "weight_decay": 0.0} for one in parts[1:])]
    optimizer = _BASES[base](groups, **rate, **for_torch)
    for_natgrad: dict[str, Any] = {"curvature": curvature, "reduction": "auto"}
    if base != "sgd":
        for_natgrad["kl_clip"] = None  # it bounds the step of SGD
    for_natgrad |= {option: value for option, value in options.items() if option in _OPTIONS}
    preconditioner = Preconditioner(model, **for_natgrad, optimizer=optimizer)
    created = PreconditionedOptimizer(optimizer, preconditioner, clip_norm=clip_norm)
    created._splits_by_decay = len(parts) > 1
    if for_natgrad["reduction"] in ("auto", "tokens"):
        created.count = "auto"  # a trainer passes no count
    return created


def resolve_name(name: str) -> tuple[str, str | None]:
    """Return the optimizer of torch, in lower case, and the curvature. None: "naturalmuon" is both.

    Raises:
        ValueError: if there are none of such names.
    """
    examples = f"'natural-muon', or an optimizer of torch and one of {', '.join(BY_NAME)}, such as 'adamw+kfac'"
    require(isinstance(name, str), "name", name, examples)
    base, plus, curvature = plain_name(name).partition("+")
    if not plus and base == "naturalmuon":
        return base, None
    by_plain_name = {plain_name(one): one for one in BY_NAME}
    fits = base in _BASES and curvature in by_plain_name
    choices = ("natural-muon", *(f"{base if base in _BASES else 'sgd'}+{one}" for one in BY_NAME))
    require(fits, "name", name, examples, did_you_mean(name, choices))
    return base, by_plain_name[curvature]


def plain_name(name: str) -> str:
    """Return a name in lower case without hyphens and underscores."""
    return name.lower().replace("-", "").replace("_", "")


def _check_options(name: str, options: Mapping[str, Any], known: set[str]) -> None:
    """Check that all options are known."""
    every = sorted({*known, "lr", "weight_decay", "decay", "clip_norm"})
    for option in options:
        require_one_of("option", option, *every, owner=name)


def _parts(model: nn.Module, weight_decay: float, decay: str) -> list[list[nn.Parameter]]:
    """Return the parameters in one list, or if only matrices are decayed in two. Frozen ones may be thawed later."""
    every = list(model.parameters())
    require(every, "model", type(model).__name__, "a model with parameters")
    if not weight_decay or decay == "all":
        return [every]
    matrices = decayed(unwrap(model))
    parts = [[one for one in every if (id(one) in matrices) == chosen] for chosen in (True, False)]
    return parts if all(parts) else [every]
