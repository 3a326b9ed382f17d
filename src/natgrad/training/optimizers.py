"""Optimizers of `torch.optim` and natgrad by name."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, overload

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from natgrad import NaturalMuon
from natgrad.errors import NatgradError, require, require_one_of
from natgrad.preconditioner.create import plain_name
from natgrad.recipes import HeavyBall

# SparseAdam takes only sparse gradients.
_CLASSES: dict[str, type[Optimizer]] = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, Optimizer) and name not in ("Optimizer", "SparseAdam")
} | {"heavyball": HeavyBall, "natural-muon": NaturalMuon}

# Those of the library pytorch_optimizer, which is imported only for them.
_OF_LIBRARY = {"lamb": "Lamb"}


class MuonWithAdamW(Optimizer):
    """`torch.optim.Muon` for the hidden matrices and AdamW for everything else, as one optimizer.

    Embeddings, the last linear layer, norms and biases use AdamW, and kernels of convolutions are matrices
    ``[out, in * height * width]`` (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks").
    Muon's step is scaled by `match_rms_adamw` (Liu et al. 2025), so that one learning rate suits both parts.

    Args:
        model: The model.
        lr: Learning rate of both parts.
        weight_decay: Decoupled weight decay of both parts.
        **options: Other options of `torch.optim.Muon`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        weight_decay: float = 0.01,
        adjust_lr_fn: str = "match_rms_adamw",
        **options: Any,
    ) -> None:
        matrices, others = split_for_muon(model)
        parts: list[Optimizer] = []
        if matrices:
            views = list(map(unfold_kernel, matrices))
            muon = Muon(views, lr=lr, weight_decay=weight_decay, adjust_lr_fn=adjust_lr_fn, **options)
            muon.param_groups[0]["params"] = matrices
            parts.append(muon)
        if others:
            parts.append(AdamW(others, lr=lr, weight_decay=weight_decay))
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step with both parts."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, group in zip(self._parts, self.param_groups, strict=True):
            # Set at each step, because loading a state replaces both containers.
            parameters = group["params"]
            matrices = list(map(unfold_kernel, parameters)) if isinstance(part, Muon) else parameters
            part.param_groups, part.state = [{**group, "params": matrices}], defaultdict(dict)
            for parameter, matrix in zip(parameters, matrices, strict=True):
                part.state[matrix] = self.state[parameter]
            part.step()
        return loss


def unfold_kernel(weight: nn.Parameter) -> nn.Parameter:
    """Return a kernel as a matrix that shares its memory, with its gradient; a matrix as it is."""
    if weight.ndim == 2:
        return weight
    view = nn.Parameter(weight.detach().view(len(weight), -1))
    view.grad = None if weight.grad is None else weight.grad.flatten(1)
    return view


def split_for_muon(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (the weights of all linear layers and convolutions but the last, all other parameters), if trainable."""
    layers = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))]
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    chosen = {module.weight for module in layers[:-1]} - embeddings - {module.weight for module in layers[-1:]}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [weight for weight in trained if weight in chosen], [other for other in trained if other not in chosen]


def names() -> list[str]:
    """Return the names of all optimizers, sorted."""
    return sorted({**_CLASSES, **_OF_LIBRARY})


def current_name(name: str) -> str:
    """Return the spelling in `names()` of a name such as "NaturalMuon"; an unknown name as it is."""
    return {plain_name(known): known for known in names()}.get(plain_name(name), name)


def check(name: str, options: Mapping[str, Any]) -> None:
    """Check an optimizer's name and the names of its options.

    Raises:
        ValueError: A name is unknown.
    """
    base, plus, curvature = str(name).partition("+")
    require(not plus, "optimizer", name, f"one name; for a curvature: --optimizer {base} --curvature {curvature}")
    require_one_of("optimizer", name, *names())
    require("lr" not in options, "option lr", options.get("lr"), "given as the learning rate")
    allowed = [option for option in _parameters(name) if option not in ("self", "params", "model", "lr")]
    for option in options:
        require_one_of("option", option, *allowed, owner=name)


def default_learning_rate(name: str) -> float:
    """Return the default learning rate of the optimizer's constructor."""
    return float(_parameters(name)["lr"].default)


def build(name: str, model: nn.Module, learning_rate: float, options: Mapping[str, Any]) -> Optimizer:
    """Build an optimizer of all trainable parameters of the model.

    Args:
        name: One of `names()`.
        model: The model, with its wrapper, which natural Muon needs.
        learning_rate: The learning rate.
        options: Other options of the constructor.

    Raises:
        ValueError: The name, an option or its value is not allowed.
    """
    check(name, options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        if name == "muon":
            return MuonWithAdamW(model, lr=learning_rate, **options)
        if name == "natural-muon":
            return NaturalMuon(model, lr=learning_rate, **options)
        build_one: Callable[..., Optimizer] = _kind(name)
        return build_one(trained, lr=learning_rate, **options)
    except TypeError as error:
        raise ValueError(f"options {dict(options)!r} are not allowed for {name}: {error}") from error


def _parameters(name: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(_kind(name).__init__).parameters


def _kind(name: str) -> type[Optimizer]:
    """Return the class of an optimizer.

    Raises:
        NatgradError: It is in a library that is not installed.
    """
    if name not in _OF_LIBRARY:
        return _CLASSES[name]
    try:
        library = import_module("pytorch_optimizer")
    except ImportError as error:
        raise NatgradError(
            f"{name} needs pytorch-optimizer, as installed by: pip install 'natgrad[benchmarks]' ({error})",
            "missing-package",
        ) from error
    found: type[Optimizer] = getattr(library, _OF_LIBRARY[name])
    return found
