"""The local quadratic model of the loss, and what the optimizer's step is worth by it and in truth.

``M(δ) = ∇ᵀδ + ½ δᵀ(F + γI)δ`` with the gradient ∇ of the mean loss, each layer's Fisher block F, and what the optimizer
really does to the parameters, δ = θ⁺ - θ. Each layer is one worker's to account for, what is left to the optimizer the
first rank's; one message sums it all up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from natgrad.damping.adaptive import Outcome
from natgrad.damping.losses import Losses
from natgrad.gradients.stacked import parameters, stacked
from natgrad.placement import Runtime
from natgrad.stacks.blocks import Stack


@dataclass
class Model:
    """The quadratic model at one step, as far as this rank accounts for it.

    Attributes:
        layers: Stacks with the raw gradients ``[N, o, i]`` and the parameters as they were.
        others: Parameters without curvature, likewise.
        damping: γ.
        scale: What makes those gradients those of the mean loss.
    """

    layers: list[tuple[Stack, Tensor, Tensor]]
    others: list[tuple[nn.Parameter, Tensor, Tensor]]
    damping: float
    scale: float | Tensor

    @classmethod
    def of(cls, stacks: Sequence[Stack], runtime: Runtime, damping: float, scale: float | Tensor) -> Model:
        """Take the raw gradients and the parameters of layers, before the former are preconditioned."""
        layers = [
            (stack, stacked(stack, lambda slot: slot.parameter.grad), parameters(stack))
            for stack in accounted(stacks, runtime.rank)
        ]
        return cls(layers, [], damping, scale)

    def take_others(self, model: nn.Module, stacks: Iterable[Stack], runtime: Runtime) -> None:
        """Take the same of what is left to the optimizer, once all ranks have its gradients."""
        known = {id(slot.parameter) for stack in stacks for member in stack.members for slot in member.layer.slots}
        rest = [p for p in model.parameters() if p.grad is not None and id(p) not in known]
        if runtime.rank == 0:
            self.others = [(p, _copy(p.grad), p.detach().clone()) for p in rest]

    def outcome(self, losses: Losses, runtime: Runtime, device: torch.device) -> Outcome:
        """Return what the optimizer's step was worth; collective, in one message on `device`.

        Raises:
            Exception: what a closure has raised; on the other ranks a `NatgradError`.
        """
        message = torch.tensor([0.0, 0.0, 0.0, *losses.told()], dtype=torch.float64, device="cpu").to(device)
        linear, curved, scale = message[0], message[1], self.scale
        for stack, W, P in self.layers:
            D = parameters(stack) - P
            linear += _inner(W, D).to(device) * scale
            curved += (_inner(D, stack.multiply(D)) + self.damping * stack.factor * _inner(D, D)).to(device)
        for parameter, gradient, before in self.others:
            D = parameter.detach() - before
            linear += _inner(gradient, D).to(device) * scale
            curved += (self.damping * _inner(D, D)).to(device)
        message[2] = float(runtime.rank == 0) * scale
        if runtime.ranks > 1:
            runtime.sum_(message, {"counters": message.numel()})
        first, second, unit, *told = message.tolist()
        return Outcome(change=losses.change(told) * unit, predicted=first + second / 2)


def accounted(stacks: Sequence[Stack], rank: int) -> list[Stack]:
    """Return the stacks that a rank accounts for: of each it is one of its workers, these in turn."""
    workers = [stack.role.seat.workers for stack in stacks]
    return [stack for index, stack in enumerate(stacks) if workers[index][index % len(workers[index])] == rank]


def _inner(left: Tensor, right: Tensor) -> Tensor:
    product: Tensor = torch.linalg.vecdot(left.flatten(), right.flatten())
    return product.double()


def _copy(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.clone()
