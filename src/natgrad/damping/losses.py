"""The loss of a step's batch before and after the optimizer's step."""

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
    """The losses of this rank's batch, computed by the closure with the random numbers of the step's own passes.

    Ranks are weighted as their gradients are: equally, or by samples if natgrad reduces; sums are added. An error of
    the closure is kept until all ranks have communicated, unless the model is sharded.
    """

    def __init__(
        self, closure: Callable[[], Any] | None, recorded: Sequence[tuple[Pass, Chance]], weight: float | None
    ):
        """Start without losses.

        Args:
            closure: Returns the loss, or (loss, ...). None: this rank had no batch.
            recorded: The forward passes of the step.
            weight: The weight of this rank in the mean. None: the losses are summed.
        """
        self._closure, self._recorded = closure, recorded
        self._summed, self._weight = weight is None, float(closure is not None) * (1.0 if weight is None else weight)
        self._values: list[float] = []
        self._error: Exception | None = None

    def compute(self, model: nn.Module, hooks: Hooks) -> None:
        """Compute the loss with the present parameters, without changing anything else.

        Raises:
            Exception: an error of the closure, if the model is sharded.
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
        """Return the numbers to sum over the ranks for `change`."""
        before, after = self._values
        # The difference of infinite losses is nan, which counts as an increase.
        return [self._weight * (after - before), self._weight, float(self._error is not None)]

    def change(self, told: Sequence[float]) -> float:
        """Return the change of the loss of all ranks.

        Args:
            told: The sums over the ranks of what `told` returned.

        Raises:
            Exception: an error of the closure on this rank; a `NatgradError` if it raised on another.
        """
        change, weight, failed = told
        if self._error is not None:
            raise self._error
        if failed:
            raise NatgradError("the closure has raised an error on another rank, whose own output tells it")
        # Without a batch on any rank the change is 0.
        return change if self._summed or not weight else change / weight
