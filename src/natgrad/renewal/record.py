"""What a rule of renewal remembers of the layers of a stack, beside the steps and through checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isnan, nan, prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from natgrad.stacks.kept import Kept, packed_shape, spec_dtype

if TYPE_CHECKING:
    from natgrad.layers import Layer
    from natgrad.stacks.blocks import Member, Stack

# What a layer's last verdict was.
RENEWED, KEPT, STOPPED, WAITS = 1.0, 2.0, 3.0, 4.0

_NUMBERS, _PREFIX = "rule", "last "


class Record:
    """For each layer of a stack its last verdict, and what the next measurement is compared with.

    Attributes:
        told: Whether workers tell the others what they have decided, in this step.
        heard: What they have told ``[3 M]``, on the device; None: nothing.
        averages: The statistics that the last renewal was made of, packed; empty where the rule compares none.
    """

    def __init__(self, stack: Stack, *, drifts: bool) -> None:
        """Begin with nothing; no tensor is made on a device.

        Args:
            stack: The stack.
            drifts: Whether statistics are to be compared with those of the last renewal.
        """
        self._stack, self._drifts = stack, drifts
        self._numbers = torch.full((len(stack.members), 3), nan, dtype=torch.float64, device="cpu")
        self._numbers[:, 1] = 0
        self.told = False
        self.heard: Tensor | None = None
        self.averages = Kept()

    def anew(self) -> Record:
        """Return one that begins with nothing."""
        return Record(self._stack, drifts=self._drifts)

    @property
    def names(self) -> tuple[str, ...]:
        """The statistics that renewals read."""
        read = {name for part in self._stack.parts for name in part.reads}
        return tuple(spec.name for spec in self._stack.statistics if spec.name in read)

    def last(self, index: int) -> float | None:
        """Return what the next measurement of a layer is compared with; None: there is nothing."""
        value = float(self._numbers[index, 0])
        return None if isnan(value) else value

    def seen(self, index: int) -> float:
        """Return what was measured of the statistics alone at the last decision on a layer; no number: nothing."""
        return float(self._numbers[index, 2])

    def verdict(self, index: int) -> float:
        """Return the last verdict on a layer; 0: there was none."""
        return float(self._numbers[index, 1])

    def describe(self, layer: Layer) -> str:
        """Say in a word what became of a layer where it was not renewed."""
        words = {KEPT: "kept", STOPPED: "stopped", WAITS: "waiting"}
        index = next(index for index, member in enumerate(self._stack.members) if member.layer is layer)
        return words.get(self.verdict(index), "")

    @property
    def bytes_per_block(self) -> int:
        """What is kept for one block beside numbers."""
        if not (self._drifts and self._stack.role.works):
            return 0
        specs = [spec for spec in self._stack.statistics if spec.name in self.names]
        dtype = self._stack.work_dtype
        return sum(prod(packed_shape(spec)) * spec_dtype(spec, dtype).itemsize for spec in specs)

    def note(self, index: int, last: float | None, verdict: float, seen: float = nan) -> None:
        """Note all three."""
        own = [nan if last is None else last, verdict, seen]
        self._numbers[index] = torch.tensor(own, dtype=torch.float64, device="cpu")

    def message(self, like: Tensor) -> Tensor:
        """Return what a worker tells the others: ``[3 M]``."""
        return self._numbers.flatten().to(like)

    @property
    def size(self) -> int:
        """The length of that message, in a step in which there is one."""
        return self._numbers.numel() if self.told else 0

    def hear(self, numbers: list[float]) -> None:
        """Note what a worker has told."""
        self._numbers.copy_(torch.tensor(numbers, dtype=torch.float64, device="cpu").view(-1, 3))

    def compare_with(self, blocks: slice) -> None:
        """Keep the statistics of some blocks, which were renewed, as they are now."""
        for name, own in self._stack.snapshot(blocks, self.names).items():
            self._kept().write(name, blocks, own)

    def to(self, dtype: torch.dtype, device: torch.device) -> None:
        """Move what is kept."""
        if self.averages:
            self.averages = self.averages.to(dtype, device)

    def _kept(self) -> Kept:
        if not self.averages:
            specs = [spec for spec in self._stack.statistics if spec.name in self.names]
            self.averages = Kept(specs, self._stack.size, self._stack.work_dtype, self._stack.device, pack=True)
        return self.averages

    # --- State --------------------------------------------------------------------------------------------------

    def state(self, member: Member) -> dict[str, Tensor]:
        """Return what is remembered of a layer, by names of their own among its tensors."""
        n, numbers = member.stop - member.start, self._numbers[self._stack.members.index(member)]
        own = {_NUMBERS: numbers.expand(n, -1)}
        if self._drifts and self._stack.role.works:
            kept = self._kept()
            own |= {f"{_PREFIX}{name}": kept.whole(name, member.blocks) for name in kept}
        return own

    def shapes(self, member: Member) -> dict[str, tuple[int, ...]]:
        """Return the shapes of that."""
        n = member.stop - member.start
        shapes: dict[str, tuple[int, ...]] = {_NUMBERS: (n, 3)}
        if self._drifts and self._stack.role.works:
            specs = (replace(spec, name=f"{_PREFIX}{spec.name}") for spec in self._stack.statistics)
            own = {f"{_PREFIX}{name}" for name in self.names}
            shapes |= {spec.name: (n, *spec.shape) for spec in specs if spec.name in own}
        return shapes

    def restore(self, member: Member, given: Mapping[str, Tensor]) -> None:
        """Take what `state` returned; where it was written without this rule, begin anew."""
        if not all(name in given for name in self.shapes(member)):
            return
        self._numbers[self._stack.members.index(member)] = given[_NUMBERS][0].to(self._numbers)
        if self._drifts and self._stack.role.works:
            kept = self._kept()
            for name in kept:
                kept.write_whole(name, member.blocks, given[f"{_PREFIX}{name}"].to(self._stack.device))
