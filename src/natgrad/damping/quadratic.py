"""The local quadratic model of the loss, and the predicted and actual change by the optimizer's step.

``M(δ) = ∇ᵀδ + ½ δᵀ(F + γI)δ`` with the gradient ∇ of the mean loss, each layer's Fisher block F, and the optimizer's
change of the parameters, δ = θ⁺ - θ. One worker evaluates each layer, all ranks evaluate the other parameters, and one
message sums the parts. For layers that FSDP2 shards, each rank evaluates its rows, and one worker gathers δ for δᵀFδ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.capture.model_hooks import ForwardPass, ForwardPasses, Hooks
from natgrad.capture.repetition import Repetition, preserve_state
from natgrad.damping.adaptive import StepOutcome
from natgrad.distributed import Communicator
from natgrad.distributed.fsdp import copies, extra_pass, held_rows, local, rows_of
from natgrad.errors import NatgradError, describe, require
from natgrad.layers import Slot
from natgrad.linalg.precision import at_least_float32
from natgrad.state.block_group import BlockGroup
from natgrad.state.parameters import ParameterRows, slots_of


class Losses:
    """The losses of this rank's batch, computed by the closure with the random numbers of the step's passes.

    Ranks are weighted as their gradients: equally, or by samples if natgrad reduces them. Losses that are sums over
    samples are added. An error of the closure is raised after all ranks have communicated, unless the model is sharded.
    """

    def __init__(
        self, closure: Callable[[], Any] | None, recorded: Sequence[ForwardPass], weight: float | None
    ) -> None:
        """Initialize without losses.

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
        """Compute and store the loss with the current parameters.

        Raises:
            Exception: an error of the closure, if the model is sharded.
        """
        value = 0.0
        if self._closure is not None and self._error is None:
            closure, repeated = self._closure, ForwardPasses(on_begin=Repetition(self._recorded).begin)

            def evaluate() -> None:
                nonlocal value
                with preserve_state(model), hooks.reporting_to(repeated), torch.enable_grad():
                    result = closure()
                loss = result[0] if isinstance(result, tuple) and result else result
                number = loss.item() if isinstance(loss, Tensor) and loss.numel() == 1 else loss
                require(isinstance(number, float), "closure()", describe(loss), "a scalar loss, or (loss, outputs)")
                value = number

            self._error = extra_pass(model, evaluate)
        self._values.append(value)

    def numbers(self) -> list[float]:
        """Return the numbers to sum over the ranks for `change`."""
        before, after = self._values
        # The difference of infinite losses is nan, which counts as an increase.
        return [self._weight * (after - before), self._weight, float(self._error is not None)]

    def change(self, change: float, weight: float, failed: float) -> float:
        """Return the change of the loss of all ranks, from the sums of `numbers`.

        Raises:
            Exception: an error of the closure on this rank; a `NatgradError` if it raised on another.
        """
        if self._error is not None:
            raise self._error
        if failed:
            raise NatgradError("the closure has raised an error on another rank, see the output of that rank")
        # Without a batch on any rank the change is 0.
        return change if self._summed or not weight else change / weight


class QuadraticModel:
    """This rank's part of the quadratic model at one step."""

    def __init__(
        self, groups: Sequence[BlockGroup], runtime: Communicator, damping: float, scale: float | Tensor
    ) -> None:
        """Copy the raw gradients and the parameters of layers, before preconditioning.

        Args:
            groups: All groups.
            runtime: The ranks.
            damping: γ.
            scale: The factor that makes raw gradients those of the mean loss.
        """
        self._accounted = list(zip(groups, accountants(groups), strict=True))
        self._runtime, self._damping, self._scale = runtime, damping, scale
        rows = ParameterRows(runtime)
        # The rows that this rank evaluates, by the ``id`` of the slot: raw gradients, and parameters before the step.
        self._before: dict[int, tuple[Tensor | None, Tensor]] = {}
        for group, accountant in self._accounted:
            for slot in slots_of(group):
                if rows.in_sum(slot, accountant):
                    gradient = held_rows(slot, rows.held(slot))
                    gradient = None if gradient is None else gradient.clone()
                    self._before[id(slot)] = gradient, _parameter(slot, rows.held(slot)).clone()
        # Parameters without curvature: this rank's part of gradients and values, and its weight in sums over the ranks.
        self._others: list[tuple[nn.Parameter, Tensor, Tensor, float]] = []

    def take_others(self, model: nn.Module) -> None:
        """Copy gradients and values of parameters without curvature, when all ranks have their gradients."""
        known = {id(slot.parameter) for group, _ in self._accounted for slot in slots_of(group)}
        for name, parameter in model.named_parameters():
            if parameter.grad is None or id(parameter) in known:
                continue
            weight = 1 / copies(name, parameter, self._runtime.ranks)
            part = local(parameter.grad).clone(), local(parameter.detach()).clone()
            self._others.append((parameter, *part, weight))

    def outcome(self, losses: Losses, device: torch.device) -> StepOutcome:
        """Return the outcome of the optimizer's step; collective, in one message on `device`.

        Raises:
            Exception: an error of this rank's closure.
            NatgradError: if the closure raised an error on another rank.
        """
        message = torch.tensor([0.0, 0.0, 0.0, *losses.numbers()], dtype=torch.float64, device="cpu").to(device)
        linear, curved = message[0], message[1]
        for parameter, gradient, before, weight in self._others:
            D = local(parameter.detach()) - before
            linear += _inner(gradient, D).to(device) * self._scale * weight
            curved += (self._damping * _inner(D, D) * weight).to(device)
        self._add_layers(linear, curved)
        message[2] = float(self._runtime.rank == 0) * self._scale
        if self._runtime.ranks > 1:
            self._runtime.sum_(message, {"counters": message.numel()})
        first, second, unit, *totals = message.tolist()
        return StepOutcome(change=losses.change(*totals) * unit, predicted=first + second / 2)

    def _add_layers(self, linear: Tensor, curved: Tensor) -> None:
        """Add this rank's part of the groups in place; collective if any is sharded."""
        rows, changes = ParameterRows(self._runtime), {}
        for group, accountant in self._accounted:
            for slot in slots_of(group):
                if rows.in_sum(slot, accountant):
                    gradient, before = self._before[id(slot)]
                    D = changes[id(slot)] = _parameter(slot, rows.held(slot)) - before
                    if gradient is not None:
                        linear += _inner(gradient, D).to(linear) * self._scale
                    curved += (self._damping * group.factor * _inner(D, D)).to(curved)
        whole = rows.gather_blocks([(group, (accountant,)) for group, accountant in self._accounted], changes, "replay")
        for group, _ in self._accounted:
            if id(group) in whole:
                D = whole[id(group)]
                curved += _inner(D, group.fisher_product(D)).to(curved)


def accountants(groups: Sequence[BlockGroup]) -> list[int]:
    """Return the rank that evaluates each group in sums over all parameters: one of its workers, in turn."""
    workers = [group.role.assignment.workers for group in groups]
    return [ranks[index % len(ranks)] for index, ranks in enumerate(workers)]


def _parameter(slot: Slot, rows: range) -> Tensor:
    return rows_of(slot.name, slot.parameter.detach(), rows)


def _inner(left: Tensor, right: Tensor) -> Tensor:
    dtype = at_least_float32(left.dtype)
    product: Tensor = torch.linalg.vecdot(left.flatten().to(dtype), right.flatten().to(dtype))
    return product.double()
