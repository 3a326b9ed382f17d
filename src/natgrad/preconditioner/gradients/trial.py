"""With ``gradients="auto"``: whether natgrad can average the gradients in place of ``DistributedDataParallel``."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.distributed import Communicator, Placement
from natgrad.distributed.ddp import Relay, averagers_of, find_replica, relay_of
from natgrad.layers import Handle, remove_all
from natgrad.preconditioner.gradients.norms import gradient_norms
from natgrad.preconditioner.gradients.reduction import Reporter, call_last

_STEPS = 2


class Trial:
    """The first steps, in which DDP averages, and gradients must be equal after the last pass and in the step.

    Attributes:
        verdict: Whether natgrad averages from the next step on. None: that is not known yet.
    """

    def __init__(self, model: nn.Module) -> None:
        """Observe the backward passes of a wrapped model."""
        self._model, self._steps = model, 0
        self.verdict: bool | None = None
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._norms: Tensor | None = None
        self._pass: int | None = None
        arrived: weakref.WeakMethod[Callable[[Tensor], None]] = weakref.WeakMethod(self._arrived)
        self._handles: list[Handle] = [
            parameter.register_post_accumulate_grad_hook(Reporter(arrived)) for parameter in self._parameters
        ]
        weakref.finalize(self, remove_all, self._handles).atexit = False

    def _arrived(self, _: Tensor) -> None:
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._pass = current
            call_last(self._note)

    @torch.no_grad()
    def _note(self) -> None:
        self._norms = gradient_norms(self._parameters)

    def end(self) -> None:
        """Stop observing."""
        remove_all(self._handles)

    def judge(self, runtime: Communicator) -> None:
        """Set the verdict in the second step, or if the norm of a gradient has changed since the last pass; collective.

        It is False, too, if DDP has a hook of the user's.
        """
        noted, self._norms, self._pass = self._norms, None, None
        is_equal = noted is not None and torch.allclose(
            noted, gradient_norms(self._parameters), rtol=0, atol=0, equal_nan=True
        )
        self._steps += 1
        if runtime.any_on_host(not is_equal):
            self.verdict = False
        elif self._steps == _STEPS:
            try:
                self.verdict = relay_of(self._model) is not None
            except RuntimeError:
                self.verdict = False


def can_try(model: nn.Module, ranks: int, placement: Placement, arguments: Mapping[str, Any]) -> bool:
    """Return whether natgrad may average in place of a wrapper, by the `arguments` of a preconditioner.

    The wrapper is of several nodes, whose link is slow, and nothing needs its averages: a scaler, a loss that is not a
    mean, DDP's mixed precision, parameters that it ignores, a communication hook, a placement of the user's. Whoever
    has averaged in its place before does so no longer.
    """
    replica, scaler = find_replica(model), arguments["scaler"]
    if replica is None:
        return False
    averagers_of(model).clear()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))  # as torchrun sets it
    special = replica.mixed_precision is not None or len(replica.parameters_to_ignore) > 0
    special |= any(not isinstance(state, Relay) for _, state in replica._comm_hooks)
    is_usual = arguments["reduction"] == "mean" and (scaler is None or not scaler.is_enabled())
    return 0 < local < ranks and not special and is_usual and placement.name == "auto"
