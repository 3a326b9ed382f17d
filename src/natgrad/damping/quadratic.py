"""The local quadratic model of the loss, and the predicted and actual change by the optimizer's step.

``M(δ) = ∇ᵀδ + ½ δᵀ(F + γI)δ`` with the gradient ∇ of the mean loss, each layer's Fisher block F, and what the optimizer
actually makes to the parameters, δ = θ⁺ - θ. One worker evaluates each layer, and the first rank the other parameters;
one message adds everything up. For layers that FSDP2 shards each rank evaluates its rows, and one worker collects δ for
δᵀFδ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from natgrad.damping.adaptive import Outcome
from natgrad.damping.losses import Losses
from natgrad.distributed import Communicator
from natgrad.distributed.fsdp import first_copy, held_rows, rows_of
from natgrad.layers import Slot
from natgrad.linalg.precision import at_least_float32
from natgrad.state.block_group import BlockGroup
from natgrad.state.sharded import Rows, slots_of


@dataclass
class Model:
    """This rank's part of the quadratic model at one step.

    Attributes:
        groups: All groups, each with the rank that accounts for it.
        damping: γ.
        scale: The factor that makes raw gradients those of the mean loss.
        shares: The rows that this rank evaluates, by the ``id`` of the slot: raw gradients, and parameters before the
            step.
        others: The same for parameters without curvature, with their names.
    """

    groups: list[tuple[BlockGroup, int]]
    damping: float
    scale: float | Tensor
    shares: dict[int, tuple[Tensor | None, Tensor]]
    others: list[tuple[str, nn.Parameter, Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, groups: Sequence[BlockGroup], runtime: Communicator, damping: float, scale: float | Tensor) -> Model:
        """Copy the raw gradients and the parameters of layers, before preconditioning."""
        pairs, rows = list(zip(groups, accountants(groups), strict=True)), Rows(runtime)
        shares = {
            id(slot): (_copy(held_rows(slot, rows.held(slot))), _parameter(slot, rows.held(slot)).clone())
            for group, accountant in pairs
            for slot in slots_of(group)
            if rows.counts(slot, accountant)
        }
        return cls(pairs, damping, scale, shares)

    def take_others(self, model: nn.Module, groups: Iterable[BlockGroup], runtime: Communicator) -> None:
        """Copy those of parameters without curvature, when all ranks have their gradients."""
        known = {id(slot.parameter) for group in groups for member in group.members for slot in member.layer.slots}
        rest = [(name, p) for name, p in model.named_parameters() if p.grad is not None and id(p) not in known]
        for name, parameter in rest:
            assert parameter.grad is not None
            gradient, before = (first_copy(name, own, runtime.rank) for own in (parameter.grad, parameter.detach()))
            if gradient is not None and before is not None:
                self.others.append((name, parameter, gradient.clone(), before.clone()))

    def outcome(self, losses: Losses, runtime: Communicator, device: torch.device) -> Outcome:
        """Return the outcome of the optimizer's step; collective, in one message on `device`.

        Raises:
            Exception: an error of a closure; on the other ranks a `NatgradError`.
        """
        message = torch.tensor([0.0, 0.0, 0.0, *losses.told()], dtype=torch.float64, device="cpu").to(device)
        linear, curved, scale = message[0], message[1], self.scale
        for name, parameter, gradient, before in self.others:
            now = first_copy(name, parameter.detach(), runtime.rank)
            assert now is not None
            D = now - before
            linear += _inner(gradient, D).to(device) * scale
            curved += (self.damping * _inner(D, D)).to(device)
        self._add_layers(linear, curved, runtime)
        message[2] = float(runtime.rank == 0) * scale
        if runtime.ranks > 1:
            runtime.sum_(message, {"counters": message.numel()})
        first, second, unit, *told = message.tolist()
        return Outcome(change=losses.change(told) * unit, predicted=first + second / 2)

    def _add_layers(self, linear: Tensor, curved: Tensor, runtime: Communicator) -> None:
        """Add this rank's part of the groups in place. Collective if any is sharded."""
        rows, changes = Rows(runtime), {}
        for group, accountant in self.groups:
            for slot in slots_of(group):
                if rows.counts(slot, accountant):
                    gradient, before = self.shares[id(slot)]
                    D = changes[id(slot)] = _parameter(slot, rows.held(slot)) - before
                    if gradient is not None:
                        linear += _inner(gradient, D).to(linear) * self.scale
                    curved += (self.damping * group.factor * _inner(D, D)).to(curved)
        whole = rows.whole([(group, (accountant,)) for group, accountant in self.groups], changes, "replay")
        for group, _ in self.groups:
            if id(group) in whole:
                D = whole[id(group)]
                curved += _inner(D, group.fisher_product(D)).to(curved)


def accounted(groups: Sequence[BlockGroup], rank: int) -> list[BlockGroup]:
    """Return the groups that a rank accounts for."""
    return [group for group, accountant in zip(groups, accountants(groups), strict=True) if accountant == rank]


def accountants(groups: Sequence[BlockGroup]) -> list[int]:
    """Return the rank that accounts for each group: one of its workers, in turn."""
    workers = [group.role.seat.workers for group in groups]
    return [own[index % len(own)] for index, own in enumerate(workers)]


def _parameter(slot: Slot, rows: range) -> Tensor:
    return rows_of(slot.name, slot.parameter.detach(), rows)


def _inner(left: Tensor, right: Tensor) -> Tensor:
    dtype = at_least_float32(left.dtype)
    product: Tensor = torch.linalg.vecdot(left.flatten().to(dtype), right.flatten().to(dtype))
    return product.double()


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
