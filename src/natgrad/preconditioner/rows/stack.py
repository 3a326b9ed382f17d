"""Blocks whose curvature is made of rows, as many as the batch decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from natgrad.curvature import RowCurvature
from natgrad.specs import TensorSpec
from natgrad.state.block_group import BlockGroup
from natgrad.state.tensors import StateTensors

if TYPE_CHECKING:
    from natgrad.state.block_group import LayerBlocks


# What has r² elements.
SQUARES = ("M", "Y")


class RowBlockGroup(BlockGroup):
    """A stack of blocks with rows ``A [N, r, i]`` and ``G [N, r, o]`` and their ``M [N, r²]``, of KID ``Y [N, r²]``.

    A block with fewer rows than another has zeros behind its own, which change nothing.

    Attributes:
        rows: r; 0 before the first renewal.
    """

    curvature: RowCurvature
    rows: int = 0
    unsized = ("A", "G", *SQUARES)

    @property
    def switches(self) -> bool:
        """Whether it has to know the gradients of each epoch."""
        return self.curvature.switches

    def _written(self) -> list[TensorSpec]:
        return list(self.curvature.held(self.rows, self.outputs, self.inputs))

    def written_like(self, own: Mapping[str, Tensor]) -> list[TensorSpec]:
        """Return the tensors for as many rows as a state has."""
        given = own.get("A")
        rows = given.shape[1] if isinstance(given, Tensor) and given.ndim == 3 else 0
        return list(self.curvature.held(rows, self.outputs, self.inputs))

    @override
    def make_room(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        most = max((own["A"].shape[1] for own in states if "A" in own), default=0)
        self._resize(most if len(states) == len(self.members) else max(most, self.rows))

    def fitted(self, name: str, values: Tensor) -> Tensor:
        """Return `values` padded with rows of zeros."""
        if name in ("A", "G"):
            return pad(values, (0, 0, 0, self.rows - values.shape[1]))
        if name not in SQUARES:
            return values
        rows = round(values.shape[1] ** 0.5)
        more = self.rows - rows
        return pad(values.unflatten(1, (rows, rows)), (0, more, 0, more)).flatten(1)

    def _resize(self, rows: int) -> None:
        if rows == self.rows:
            return
        before, wide, kept = self.held, self.rows, min(rows, self.rows)
        self.rows, self.held = rows, StateTensors()
        if not before:
            return
        fresh, whole = self.allocate_held(), slice(None)
        for name in fresh:
            values = before.read(name, whole)
            if name in ("A", "G"):
                values = values[:, :kept]
            elif name in SQUARES:
                values = values.unflatten(1, (wide, wide))[:, :kept, :kept].flatten(1)
            fresh.write(name, whole, self.fitted(name, values))

    def draft(self, rows: int) -> StateTensors:
        """Return memory for a renewal with so many rows, with zeros in it; the last one stays as it is."""
        dtype = self.allocate_held().dtype
        return StateTensors(self.curvature.held(rows, self.outputs, self.inputs), self.size, dtype, self.device)

    def install(self, fresh: StateTensors, rows: int, fine: Mapping[LayerBlocks, list[bool]]) -> None:
        """Hold what a renewal has made of some layers, where it is fine; the other blocks keep what they had.

        Args:
            fresh: From `draft`, written.
            rows: Its rows.
            fine: For each block of those layers, whether it succeeded.
        """
        good = [False] * self.size
        for member, flags in fine.items():
            good[member.blocks] = flags
        if all(good):
            if self.switches:
                fresh["gradient"] = self.allocate_held()["gradient"]
            self.held, self.rows = fresh, rows
        elif any(good):
            self._resize(max(rows, self.rows))
            for block, one in enumerate(good):
                own = slice(block, block + 1)
                for name in set(fresh) - {"gradient"} if one else ():
                    self.held.write(name, own, self.fitted(name, fresh.read(name, own)))
        for member, flags in fine.items():
            self.renewed("M", member.start, flags)
            self.failures.conclude(range(member.start, member.stop))

    def saw(self, W: Tensor, places: list[int] | None) -> None:
        """Add the gradients to the sum of the epoch, leaving out what is not finite."""
        if self.switches:
            self.allocate_averages()
            total = self.allocate_held()["gradient"]
            own = W.flatten(1).nan_to_num(0.0, 0.0, 0.0).to(total.dtype)
            if places is None:
                total.add_(own)
            else:
                total.index_add_(0, torch.tensor(places, device="cpu").to(total.device), own)

    def end_epoch(self) -> Tensor | None:
        """Return ‖Δ‖² of these layers in float64, and begin the next Δ; None: there is none."""
        if not (self.switches and self.role.is_gradient_worker and self.held):
            return None
        total = self.held["gradient"]
        square = total.square().sum(dtype=torch.float64)
        total.zero_()
        return square


def row_stacks(stacks: Iterable[BlockGroup]) -> list[RowBlockGroup]:
    """Return those of some stacks whose curvature keeps rows."""
    return [stack for stack in stacks if isinstance(stack, RowBlockGroup)]
