"""A trust region for the optimizer's step, including momentum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from natgrad.curvature import Curvature
from natgrad.damping.quadratic import accountants
from natgrad.distributed import Communicator
from natgrad.distributed.fsdp import rows_of, whole
from natgrad.errors import require
from natgrad.layers import Layer, Slot
from natgrad.schedule import check_number
from natgrad.state.block_group import BlockGroup
from natgrad.state.failures import Level
from natgrad.state.parameters import ParameterRows, has_shards, slots_of, stacked

if TYPE_CHECKING:
    from natgrad.preconditioner.gradients.stacked import GroupGradients


@dataclass(frozen=True)
class TrustRegion:
    """Bounds ``½ δᵀFδ``, approximately the KL divergence between the model's predictions before and after a step.

    δ is the change that `torch.optim.SGD` will make to the preconditioned layers, including learning rates, momentum,
    dampening, Nesterov momentum and weight decay. If it is too long, ``.grad`` is changed so that the optimizer makes
    the change ``s δ``, with one s for all layers and ``½ s² δᵀFδ = radius``. The optimizer's state does not change.
    (A number as ``kl_clip`` bounds only the effect of one gradient: with momentum m, steps are up to 1 / (1 - m) times
    as long.) Each step computes a product with F, which costs about as much as preconditioning. If not all ranks are
    workers of all layers, each step sends one number, and for sharded layers also weight decay and momentum terms.

    Attributes:
        radius: The bound, in nats, above 0.

    Raises:
        ValueError: if `radius` is not above 0.
    """

    radius: float

    def __post_init__(self) -> None:
        """Check the radius."""
        check_number("radius", self.radius, "a number > 0", minimum=0, strict=True)

    def check(self, optimizer: object, covered: Iterable[tuple[Layer, Curvature]]) -> None:
        """Check the optimizer and the curvatures.

        Raises:
            ValueError: if the optimizer is not SGD, or a curvature has no `fisher_product`.
        """
        known = type(optimizer) is torch.optim.SGD
        allowed = "a torch.optim.SGD, whose steps are known in advance, with kl_clip=TrustRegion(...)"
        require(known, "optimizer", type(optimizer).__name__, allowed)
        assert isinstance(optimizer, torch.optim.SGD)
        damped = any(group["momentum"] and group["dampening"] >= 1 for group in optimizer.param_groups)
        require(not damped, "optimizer", "of dampening 1", "one whose steps depend on the gradient")
        for _, curvature in covered:
            fits = curvature.fisher_product_reads is not None
            allowed = "one with fisher_product, such as KFAC, with kl_clip=TrustRegion(...)"
            require(fits, "curvature", curvature, allowed)

    def hold(
        self,
        entries: Sequence[GroupGradients],
        optimizer: torch.optim.Optimizer,
        runtime: Communicator,
        *,
        shares_work: bool,
    ) -> Tensor | float:
        """Change preconditioned gradients in place so that the optimizer's step stays within the bound, and return s.

        Args:
            entries: The gradients of all groups. Non-finite blocks are zero.
            optimizer: The SGD.
            runtime: The ranks.
            shares_work: Whether each rank holds the curvature of some layers only.
        """
        groups, rules = [entry.group for entry in entries], _rules(optimizer)
        if not groups:
            return 1.0
        shares_work = shares_work or any(map(has_shards, groups))  # no rank alone has all rows
        owners = zip(groups, accountants(groups), strict=True)
        evaluated = {id(group) for group, accountant in owners if accountant == runtime.rank or not shares_work}
        additions = _Additions(groups, rules, runtime)
        added = [additions.blocks(entry) for entry in entries]
        total = torch.zeros((), dtype=torch.float64, device=groups[0].device)
        for entry, B in zip(entries, added, strict=True):
            if id(entry.group) in evaluated:
                D = _whole(entry, entry.V + B) * _rates(entry.group, lambda slot: rules[id(slot.parameter)].rate(slot))
                total += torch.linalg.vecdot(D.flatten(), entry.group.fisher_product(D).flatten()).double().to(total)
        if shares_work and runtime.ranks > 1:
            runtime.sum_(total.view(1), {"counters": 1})
        s = (2.0 * self.radius / total).sqrt().clamp(max=1.0).nan_to_num(1.0)
        for entry, B in zip(entries, added, strict=True):
            if entry.held is not None:
                additions.scale_held_rows(entry, s)
                continue
            share = s.to(entry.V)
            changed = share * entry.V + (share - 1) * B
            entry.V = torch.where(entry.levels[:, None, None] > Level.PLAIN, changed, entry.V)
        return s


@dataclass(frozen=True)
class _Rule:
    """The change that SGD makes to a parameter: ``-lr sign c (V + sign (decay θ + k buffer))``.

    Attributes:
        lr: The learning rate.
        sign: -1 if the optimizer maximizes, otherwise 1.
        c: The factor of the gradient of this step.
        decay: The weight decay.
        k: The factor of the momentum buffer, relative to the gradient.
        buffer: The momentum buffer before the step. None: there is none.
    """

    lr: float | Tensor
    sign: float
    c: float
    decay: float
    k: float
    buffer: Tensor | None

    @classmethod
    def of(cls, group: dict[str, Any], state: dict[str, Any]) -> _Rule:
        """Return the rule for a parameter of a group with this state."""
        momentum, buffer = group["momentum"], state.get("momentum_buffer")
        c, k = 1.0, 0.0
        if momentum and buffer is None:
            c = 1 + momentum if group["nesterov"] else 1.0
        elif momentum:
            kept = 1 - group["dampening"]
            c = 1 + momentum * kept if group["nesterov"] else kept
            k = momentum * (momentum if group["nesterov"] else 1.0)
        sign = -1.0 if group["maximize"] else 1.0
        return cls(group["lr"], sign, c, group["weight_decay"], k / c, buffer if k else None)

    @property
    def adds(self) -> bool:
        """Whether the step depends on more than the gradient."""
        return bool(self.decay) or self.buffer is not None

    def added(self, slot: Slot, rows: range) -> Tensor:
        """Return the weight decay and momentum terms that SGD adds to the gradient, for rows of this rank."""
        parameter = rows_of(slot.name, slot.parameter.detach(), rows)
        result = parameter * (self.sign * self.decay) if self.decay else torch.zeros_like(parameter)
        if self.buffer is not None:
            result += rows_of(slot.name, self.buffer, rows) * (self.sign * self.k)
        return result

    def rate(self, slot: Slot) -> float | Tensor:
        """Return the factor of the step, without its sign."""
        lr = self.lr.double() if isinstance(self.lr, Tensor) else self.lr
        return 0.0 if slot.parameter.grad is None else lr * self.c


class _Additions:
    """The weight decay and momentum terms that the optimizer adds to the gradients of layers."""

    def __init__(self, groups: Sequence[BlockGroup], rules: Mapping[int, _Rule], runtime: Communicator) -> None:
        """Gather the rows of all ranks on the accountants of the groups; collective if any rule has such terms."""
        self._rows = ParameterRows(runtime)
        self._values: dict[int, Tensor] = {}  # this rank's rows, by the ``id`` of the slot
        added = [
            (group, (accountant,))
            for group, accountant in zip(groups, accountants(groups), strict=True)
            if any(rules[id(slot.parameter)].adds for slot in slots_of(group))
        ]
        for group, _ in added:
            for slot in slots_of(group):
                self._values[id(slot)] = rules[id(slot.parameter)].added(slot, self._rows.held(slot))
        self._whole = self._rows.gather_blocks(added, self._values, "gradients")

    def blocks(self, entry: GroupGradients) -> Tensor | float:
        """Return the terms as blocks ``[n, o, i]``, zero for rows that this rank does not have."""
        if entry.held is not None or id(slots_of(entry.group)[0]) not in self._values:
            return 0.0
        group = entry.group
        found = self._whole[id(group)] if id(group) in self._whole else self._rows.local_blocks(group, self._values)
        return found[entry.blocks]

    def scale_held_rows(self, entry: GroupGradients, s: Tensor) -> None:
        """Scale the optimizer's step by s in this rank's rows of layers that other ranks precondition."""
        for held in entry.held or ():
            scale = s.to(held.values)
            changed = scale * held.values
            if id(held.slot) in self._values:
                changed = changed + (scale - 1) * self._values[id(held.slot)].reshape(-1).to(held.values)
            held.values.copy_(torch.where(entry.levels[held.block] > Level.PLAIN, changed, held.values))


def copied(optimizer: torch.optim.Optimizer, copies: Mapping[int, nn.Parameter]) -> torch.optim.SGD:
    """Return an SGD that updates copies of parameters, by the ``id`` of the originals, as `optimizer` does these.

    Collective if parameters are sharded.
    """
    groups: list[dict[str, Any]] = []
    buffers: dict[Tensor, Any] = {}
    for group in optimizer.param_groups:
        for parameter in (parameter for parameter in group["params"] if id(parameter) in copies):
            copy, buffer = copies[id(parameter)], optimizer.state.get(parameter, {}).get("momentum_buffer")
            groups.append({**group, "params": [copy]})
            if buffer is not None:
                buffers[copy] = {"momentum_buffer": whole(buffer).to(copy)}
    copied_optimizer = torch.optim.SGD(groups, lr=0.0)
    copied_optimizer.state.update(buffers)
    return copied_optimizer


def _rules(optimizer: torch.optim.Optimizer) -> Mapping[int, _Rule]:
    """Return rules by the ``id`` of the parameter. Other parameters than the optimizer's do not change."""
    rules = defaultdict[int, _Rule](lambda: _Rule(0.0, 1.0, 1.0, 0.0, 0.0, None))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            rules[id(parameter)] = _Rule.of(group, optimizer.state.get(parameter, {}))
    return rules


def _whole(entry: GroupGradients, values: Tensor) -> Tensor:
    """Return values of an entry's blocks ``[n, o, i]`` in the blocks of the group ``[N, o, i]``, zero elsewhere."""
    if len(entry.members) == len(entry.group.members):
        return values
    whole = values.new_zeros(entry.group.size, *values.shape[1:])
    whole[entry.blocks] = values
    return whole


def _rates(group: BlockGroup, of: Callable[[Slot], float | Tensor]) -> float | Tensor:
    """Return a number for each parameter of a group, as one number or, if they differ, as blocks ``[N, o, i]``."""
    values = [of(slot) for slot in slots_of(group)]
    if not any(isinstance(value, Tensor) for value in values) and len(set(values)) == 1:
        return values[0]
    dtype, device = group.work_dtype, group.device
    # Filled on the device, because a copy from the host would synchronize.
    numbers = {
        id(slot): value.to(device, dtype)
        if isinstance(value, Tensor)
        else torch.full((), value, dtype=dtype, device=device)
        for slot, value in zip(slots_of(group), values, strict=True)
    }
    return stacked(group, lambda slot: numbers[id(slot)].expand(slot.parameter.shape))
