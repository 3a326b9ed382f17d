"""One call that builds natural Muon, or an optimizer of torch beside a curvature, for a whole model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from natgrad.curvature import BY_NAME
from natgrad.errors import require, require_one_of
from natgrad.preconditioner.natural_muon import NaturalMuon, decayed
from natgrad.preconditioner.optimizer import PreconditionedOptimizer
from natgrad.preconditioner.preconditioner import Preconditioner

# Those that move any parameter by its gradient alone.
_EXCLUDED = {"Optimizer", "SparseAdam", "LBFGS", "Muon"}
_BASES: dict[str, type[Optimizer]] = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, Optimizer) and name not in _EXCLUDED
}
_OPTIONS = inspect.signature(Preconditioner.__init__).parameters.keys() - {"self", "model", "curvature", "optimizer"}


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
        decay: Which parameters `weight_decay` is for: "matrices", that is, no biases, norms and embeddings, which have
            a parameter group of their own; or "all".
        clip_norm: The largest norm of the gradients (`natgrad.PreconditionedOptimizer`). None: any.
        **options: For "natural-muon" the other options of `natgrad.NaturalMuon`. Otherwise those of
            `natgrad.Preconditioner` and of the optimizer of torch. `reduction` is "auto" by default. With "auto" and
            "tokens" the attribute `count` of the result is "auto", so that masked labels are not counted.

    Returns:
        A `natgrad.NaturalMuon` or another `natgrad.PreconditionedOptimizer`, with the usual parameter groups.

    Raises:
        ValueError: if the name or an option is unknown, or a value is not allowed.

    Example:
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
    own = {option: value for option, value in options.items() if option not in _OPTIONS}
    own |= {"weight_decay": weight_decay} if "weight_decay" in known else {}
    optimizer = _BASES[base](_groups(model, weight_decay, decay), **rate, **own)
    others = {option: value for option, value in options.items() if option in _OPTIONS}
    preconditioner = Preconditioner(model, curvature, optimizer=optimizer, **{"reduction": "auto", **others})
    created = PreconditionedOptimizer(optimizer, preconditioner, clip_norm=clip_norm)
    if options.get("reduction", "auto") in ("auto", "tokens"):
        created.count = "auto"  # masked labels; a trainer passes no count
    return created


def resolve_name(name: str) -> tuple[str, str | None]:
    """Return the optimizer of torch, in lower case, and the curvature. None: "naturalmuon" is both.

    Raises:
        ValueError: if there are none of such names.
    """
    choices = {plain(one): one for one in ("natural-muon", *(f"sgd+{curvature}" for curvature in BY_NAME))}
    examples = f"'natural-muon', or an optimizer of torch and one of {', '.join(BY_NAME)}, such as 'adamw+kfac'"
    require(isinstance(name, str), "name", name, examples)
    base, plus, curvature = plain(name).partition("+")
    if not plus and base == "naturalmuon":
        return base, None
    by_plain_name = {plain(one): one for one in BY_NAME}
    close = get_close_matches(plain(name), choices, 1)
    meant = f" (did you mean {choices[close[0]]!r}?)" if close and close[0] != plain(name) else ""
    require(base in _BASES and curvature in by_plain_name, "name", name, examples + meant)
    return base, by_plain_name[curvature]


def plain(name: str) -> str:
    """Return a name in lower case without hyphens and underscores."""
    return name.lower().replace("-", "").replace("_", "")


def _check_options(name: str, options: Mapping[str, Any], known: set[str]) -> None:
    """Check that all options are known."""
    for option, value in options.items():
        allowed = f"left out: the options of {name!r} are {', '.join(sorted(known))}"
        require(option in known, option, value, allowed)


def _groups(model: nn.Module, weight_decay: float, decay: str) -> list[dict[str, Any]]:
    """Return the parameter groups of all trained parameters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    require(trained, "model", type(model).__name__, "a model with parameters that require gradients")
    matrices = decayed(model) if weight_decay and decay == "matrices" else {id(parameter) for parameter in trained}
    groups: list[dict[str, Any]] = [{"params": [one for one in trained if id(one) in matrices]}]
    groups.append({"params": [one for one in trained if id(one) not in matrices], "weight_decay": 0.0})
    return [group for group in groups if group["params"]]
