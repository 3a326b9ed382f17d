"""With ``gradients="auto"``: whether natgrad can average the gradients in place of ``DistributedDataParallel``."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.distributed import Communicator, Placement
from natgrad.distributed.ddp import averagers_of, find_replica, relay_of
from natgrad.layers import Handle, remove_all
from natgrad.preconditioner.gradients.norms import gradient_norms
from natgrad.preconditioner.gradients.reduction import Reporter, call_last

_STEPS = 2


class Trial:
    """The first steps, in which DDP averages, and gradients must be equal after the last pass and in the step.

    Attributes:
        decision: Whether natgrad averages from the next step on. None: that is not known yet.
    """

    def __init__(self, model: nn.Module) -> None:
        """Observe the backward passes of a wrapped model."""
        self._model, self._steps = model, 0
        self.decision: bool | None = None
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._noted: tuple[Tensor, list[tuple[int, int]]] | None = None
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

    def _note(self) -> None:
        self._noted = self._present()

    @torch.no_grad()
    def _present(self) -> tuple[Tensor, list[tuple[int, int]]]:
        """Return the norms of the gradients, which show changes of ``.grad.data``, and versions, which show others."""
        gradients = [parameter.grad for parameter in self._parameters]
        versions = [(id(gradient), -1 if gradient is None else gradient._version) for gradient in gradients]
        return gradient_norms(self._parameters), versions

    def end(self) -> None:
        """Stop observing."""
        remove_all(self._handles)

    def decide(self, runtime: Communicator) -> None:
        """Set the decision in the second step, or if a gradient has been changed since the last pass; collective.

        It is False, too, if DDP has a hook of the user's.
        """
        noted, self._noted, self._pass = self._noted, None, None
        norms, versions = self._present()
        is_equal = (
            noted is not None
            and noted[1] == versions
            and torch.allclose(noted[0], norms, rtol=0, atol=0, equal_nan=True)
        )
        self._steps += 1
        if runtime.any_on_host(not is_equal):
            self.decision = False
        elif self._steps == _STEPS:
            try:
                self.decision = relay_of(self._model) is not None
            except RuntimeError:
                self.decision = False


def can_try(model: nn.Module, ranks: int, placement: Placement, arguments: Mapping[str, Any]) -> bool:
    """Return whether natgrad may average in place of a wrapper, by the `arguments` of a preconditioner.

    The wrapper is of several nodes, whose link is slow, and nothing needs its averages: a scaler, a loss that is not a
    mean, DDP's mixed precision, parameters that it ignores, a placement of the user's. An earlier preconditioner no
    longer averages in its place.
    """
    replica, scaler = find_replica(model), arguments["scaler"]
    if replica is None:
        return False
    averagers_of(model).clear()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))  # as torchrun sets it
    special = replica.mixed_precision is not None or len(replica.parameters_to_ignore) > 0
    is_usual = arguments["reduction"] == "mean" and (scaler is None or not scaler.is_enabled())
    return 0 < local < ranks and not special and is_usual and placement.name == "auto"
