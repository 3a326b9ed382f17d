"""Copy a preconditioner: rebuild it on a copy of its model with the same arguments and state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from natgrad.distributed.fsdp import find_mesh
from natgrad.errors import NatgradWarning
from natgrad.preconditioner import Preconditioner


@dataclass(frozen=True)
class Parts:
    """The data from which a preconditioner is rebuilt.

    Attributes:
        kind: Its class.
        model: The model, without natgrad's hooks.
        arguments: The arguments of the constructor, without the model and the optimizer.
        has_optimizer: Whether it has an optimizer.
        state: Its state.
    """

    kind: type[Preconditioner]
    model: nn.Module
    arguments: Mapping[str, Any]
    has_optimizer: bool
    state: Mapping[str, Any]


def parts(preconditioner: Preconditioner) -> tuple[Callable[[Optimizer, Parts], Preconditioner], Parts]:
    """Return the function that rebuilds a preconditioner, and its argument.

    Raises:
        TypeError: if it belongs to a process group.
    """
    model, arguments = preconditioner.parts.model, preconditioner._arguments
    obstacle = _obstacle(preconditioner, model, arguments)
    if obstacle:
        raise TypeError(
            f"this PreconditionedOptimizer cannot be copied or pickled: it is {obstacle}. Save its "
            "state_dict(gather=True), and load it into one that you build for the copy"
        )
    state = preconditioner.state_dict()
    return rebuilt, Parts(type(preconditioner), model, arguments, preconditioner.optimizer is not None, state)


def _obstacle(preconditioner: Preconditioner, model: nn.Module, arguments: Mapping[str, Any]) -> str:
    """Return why a preconditioner cannot be copied. Empty: it can."""
    if isinstance(model, DistributedDataParallel):
        return "of a model in DistributedDataParallel, which belongs to a process group"
    if find_mesh(model) is not None:
        return "of a model that FSDP2 shards, whose mesh cannot be copied"
    for name in ("process_group", "mesh"):
        if arguments[name] is not None:
            return f"built with {name}=, which cannot be copied"
    if preconditioner.plan.columns > 1:
        return f"built with placement '{preconditioner.plan.placement}', where each rank holds a part of the state"
    return ""


def rebuilt(optimizer: Optimizer, own: Parts) -> Preconditioner:
    """Return the copy of a preconditioner.

    Args:
        optimizer: The copy of its optimizer.
        own: The copies of its parts.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NatgradWarning)  # the original has warned already
        copy = own.kind(own.model, **own.arguments, optimizer=optimizer if own.has_optimizer else None)
    copy.load_state_dict(own.state)
    return copy
