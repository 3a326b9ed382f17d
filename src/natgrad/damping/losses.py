"""The loss of a step's batch, before the optimizer's step and after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.capture.model_hooks import Forward, Hooks, Pass
from natgrad.capture.repetition import Chance, Repetition, as_found
from natgrad.distributed.fsdp import resharded
from natgrad.errors import NatgradError, describe, require


class Losses:
    """What a closure returns of this rank's batch, each time with the random numbers of the step's own passes.

    All ranks weigh alike where their gradients are averaged as they are, by their samples where natgrad weighs them so,
    and are summed where the loss is a sum. What the closure raises is kept until all ranks have met, unless the model
    is sharded.
    """

    def __init__(
        self, closure: Callable[[], Any] | None, recorded: Sequence[tuple[Pass, Chance]], weight: float | None
    ):
        """Compute none yet.

        Args:
            closure: Returns the loss, or (loss, ...); None: this rank had no batch.
            recorded: The forward passes of the step.
            weight: Of this rank in the mean; None: the losses are summed.
        """
        self._closure, self._recorded = closure, recorded
        self._summed, self._weight = weight is None, float(closure is not None) * (1.0 if weight is None else weight)
        self._values: list[float] = []
        self._error: Exception | None = None

    def compute(self, model: nn.Module, hooks: Hooks) -> None:
        """Compute the loss with the parameters as they are now; all else stays as it is found.

        Raises:
            Exception: what the closure raises, where the model is sharded.
        """
        if self._closure is None or self._error is not None:
            self._values.append(0.0)
            return
        repeated = Forward(script=Repetition(self._recorded))
        with resharded(model) as sharded:
            try:
                with as_found(model), hooks.reporting_to(repeated), torch.enable_grad():
                    result = self._closure()
                loss = result[0] if isinstance(result, tuple) and result else result
                number = loss.item() if isinstance(loss, Tensor) and loss.numel() == 1 else loss
                require(isinstance(number, float), "closure()", describe(loss), "a scalar loss, or (loss, outputs)")
                self._values.append(number)
            except Exception as error:
                if sharded:
                    raise
                self._error = error
                self._values.append(0.0)

    def told(self) -> list[float]:
        """Return what the ranks sum up to tell the change of the loss."""
        before, after = self._values
        # Of infinite losses the difference would be no number, which stands for any that is no decrease.
        return [self._weight * (after - before), self._weight, float(self._error is not None)]

    def change(self, told: Sequence[float]) -> float:
        """Return the change of the loss of all ranks, of what `told` has summed up to.

        Raises:
            Exception: what the closure has raised on this rank; else a `NatgradError` where it has on another.
        """
        change, weight, failed = told
        if self._error is not None:
            raise self._error
        if failed:
            raise NatgradError("the closure has raised an error on another rank, whose own output tells it")
        # Without a batch on any rank the change is 0.
        return change if self._summed or not weight else change / weight
