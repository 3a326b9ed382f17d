"""The gradients of layers as the blocks of their group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.distributed.fsdp import gradient_target, held_rows, is_sharded
from natgrad.layers import Layer, Slot
from natgrad.linalg import tensor_on
from natgrad.linalg.device import known_all
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.failures import Level


@dataclass
class HeldRows:
    """Rows of a preconditioned gradient that this rank holds; the layer, which another rank has, begins at `block`."""

    slot: Slot
    rows: range
    block: int
    values: Tensor


@dataclass
class GroupGradients:
    """The gradients of some layers of a group: n blocks.

    Attributes:
        W: The raw gradients ``[n, o, i]``, while they are preconditioned.
        V: The preconditioned gradients ``[n, o, i]``; W where there is no curvature yet.
        held: Instead of V, if the parameters are sharded and this rank is not a worker: the rows that it holds.
        inner: ⟨V, W⟩ of each block ``[n]``; not finite where the gradient is not, or where V is unusable.
        is_fine: Whether the host knows that `inner` is finite.
        levels: The `Level` of each layer; a tensor ``[m]`` after the ranks have shared them.
        failed: Whether each block gets no update, by `inner` ``[n]`` (bool). None: all get one.
        counts: The number of blocks of each layer.
        blocks: The blocks in the group, as an index.
    """

    group: BlockGroup
    members: list[LayerBlocks]
    W: Tensor = field(init=False)
    V: Tensor = field(init=False)
    held: list[HeldRows] | None = None
    inner: Tensor = field(init=False)
    is_fine: bool = False
    levels: list[Level] | Tensor = field(init=False)
    failed: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        self.device, self.dtype = self.group.device, self.group.work_dtype
        self.counts = [member.stop - member.start for member in self.members]
        self.blocks = self.group.blocks_of(self.members)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the layers."""
        return [slot.parameter for member in self.members for slot in member.layer.slots]

    @property
    def size(self) -> int:
        """The number of blocks, n."""
        return sum(self.counts)

    @property
    def sent(self) -> torch.dtype:
        """The dtype in which V, and rows of sharded gradients, are sent to other ranks."""
        group = self.group
        is_narrow = group.curvature.is_bfloat16(group.outputs, group.inputs, group.device)
        return torch.bfloat16 if is_narrow else self.dtype

    def have_curvature(self) -> Tensor:
        """Return whether each block's layer has curvature ``[n]`` (bool)."""
        levels, counts = self.levels, self.counts
        if isinstance(levels, Tensor):
            blocks = tensor_on(levels.device, counts)
            return (levels > Level.PLAIN).repeat_interleave(blocks, output_size=len(self.inner))
        known = [level > Level.PLAIN for level, count in zip(levels, counts, strict=True) for _ in range(count)]
        # Filled on the device where all are alike, because copying takes longer.
        return self.inner.new_ones(len(known), dtype=torch.bool) if all(known) else tensor_on(self.device, known)

    def by_layer(self) -> Iterator[GroupGradients]:
        """Yield the gradients of each layer apart; those of V and `inner` are views."""
        start = 0
        for place, (member, count) in enumerate(zip(self.members, self.counts, strict=True)):
            part, blocks = GroupGradients(self.group, [member]), slice(start, start + count)
            if self.group.role.is_gradient_worker:
                part.V, part.inner, part.is_fine = self.V[blocks], self.inner[blocks], self.is_fine
                part.levels = self.levels[place : place + 1]
            start += count
            yield part

    def gather(self, received: Mapping[int, Tensor]) -> None:
        """Copy the values of ``.grad`` to `W`.

        The values of sharded parameters are the `received` ones, by the parameter's ``id``. A missing gradient of a
        weight or bias counts as zero.
        """
        group = self.group
        self.W = torch.empty(self.size, group.outputs, group.inputs, dtype=self.dtype, device=self.device)
        targets, sources = [], []
        for layer, slot, view in places(self.members, self.W):
            gradient = slot.parameter.grad
            if gradient is None:
                view.zero_()
                continue
            rows, place = layer.align(slot, received.get(id(slot.parameter), gradient), view)
            targets.append(place)
            sources.append(rows)
        _copy(targets, sources)

    def clear_(self, bad: Tensor) -> None:
        """Make V zero where it is `bad` ``[n]``. Workers clear what other ranks hold."""
        if self.held is None and not known_all(~bad):
            self.V.masked_fill_(bad[:, None, None], 0)  # a product would keep NaN

    def scale_(self, scale: Tensor) -> None:
        """Multiply V by `scale` where there is curvature."""
        factors = torch.where(self.have_curvature(), scale.to(self.device), 1.0)
        if self.held is None:
            self.V.mul_(factors[:, None, None])
        for rows in self.held or ():
            rows.values.mul_(factors[rows.block])

    def add_to(self, parameters: Sequence[Tensor], factors: Mapping[int, Any]) -> None:
        """Add V times a factor, by the parameter's ``id``, to those of the layers' `parameters` that have one."""
        for (layer, slot, view), parameter in zip(places(self.members, self.V), parameters, strict=True):
            if (factor := factors.get(id(parameter))) is not None:
                target, values = layer.align(slot, parameter, view)
                torch._foreach_add_([target], [values.to(target)], alpha=factor)

    def write(self) -> None:
        """Copy the values of V to ``.grad``, in place."""
        targets, sources = [], []
        for share in self.held or ():
            rows = held_rows(share.slot, share.rows)
            if rows is not None and len(rows):
                targets.append(rows)
                sources.append(share.values.view(rows.shape))
        for layer, slot, view in places(self.members, self.V) if self.held is None else ():
            gradient = slot.parameter.grad
            if gradient is not None:
                target, values = gradient_target(layer, slot, gradient, view)
                targets.append(target)
                sources.append(values)
        _copy(targets, sources)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:  # there may be none: other ranks expect a result even for a layer that no rank has used
        torch._foreach_copy_(targets, sources)


def has_shards(group: BlockGroup) -> bool:
    """Return whether any parameter of a group is sharded."""
    return any(is_sharded(slot.parameter) for member in group.members for slot in member.layer.slots)


def places(members: list[LayerBlocks], stacked: Tensor) -> Iterator[tuple[Layer, Slot, Tensor]]:
    """Yield each parameter of some layers with its columns ``[n, o, ...]`` of their blocks `stacked`."""
    parts = stacked.split_with_sizes([member.stop - member.start for member in members])
    for member, part in zip(members, parts, strict=True):
        slots = member.layer.slots
        for slot in slots:
            yield member.layer, slot, part if len(slots) == 1 else part[:, :, slot.columns]
