"""For timm's training scripts: an optimizer from the arguments of ``timm.optim.create_optimizer_v2``."""

from __future__ import annotations

from typing import Any

from torch import nn

from natgrad.errors import require
from natgrad.preconditioner.create import create_optimizer, resolve_name
from natgrad.preconditioner.optimizer import PreconditionedOptimizer


def create_optimizer_v2(
    model: nn.Module,
    opt: str = "natural-muon",
    lr: float | None = None,
    weight_decay: float = 0.0,
    momentum: float = 0.9,
    filter_bias_and_bn: bool = True,
    **kwargs: Any,
) -> PreconditionedOptimizer:
    """Build natgrad's optimizer in the place of timm's, whose own "natural_muon" is another Muon.

    Args:
        model: The model, not its parameters.
        opt: The name of `natgrad.create_optimizer`.
        lr: The learning rate.
        weight_decay: The weight decay.
        momentum: The momentum of natural Muon and of SGD.
        filter_bias_and_bn: Whether biases, norms and embeddings are not decayed.
        **kwargs: Other options of `natgrad.create_optimizer`.

    Raises:
        ValueError: as `natgrad.create_optimizer`; for the layer decay and parameter groups of timm.
    """
    for name in ("layer_decay", "param_group_fn"):
        require(kwargs.pop(name, None) is None, name, True, "left out: natgrad makes the parameter groups")
    for name in ("layer_decay_min_scale", "layer_decay_no_opt_scale"):  # timm's scripts pass their defaults
        kwargs.pop(name, None)
    if resolve_name(opt)[0] in ("naturalmuon", "sgd"):
        kwargs["momentum"] = momentum
    decay: Any = "matrices" if filter_bias_and_bn else "all"
    return create_optimizer(model, opt, lr=lr, weight_decay=weight_decay, decay=decay, **kwargs)
