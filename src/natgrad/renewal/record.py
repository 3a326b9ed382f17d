"""What a rule of renewal remembers of the layers of a stack, beside the steps and through checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
# What is known of a layer on which nothing was decided, and of one whose renewal has yet to succeed.
_NOTHING, _AGAIN = (nan, 0.0, nan), (nan, RENEWED, nan)


class Record:
    """For each layer of a stack its last verdict, and what the next measurement is compared with.

    Attributes:
        told: Whether workers tell the others what they have decided, in this step.
        heard: What they have told ``[3 M]``, on the device; None: nothing.
        averages: The statistics that the last renewal was made of, packed; empty where the rule compares none.
        under_way: The numbers of the layers whose renewal was begun, and of which nobody knows how it ends.
    """

    def __init__(self, stack: Stack, *, drifts: bool) -> None:
        """Begin with nothing; no tensor is made on a device.

        Args:
            stack: The stack.
            drifts: Whether statistics are to be compared with those of the last renewal.
        """
        self._stack, self._drifts = stack, drifts
        self._numbers = torch.tensor([_NOTHING] * len(stack.members), dtype=torch.float64, device="cpu")
        self.told = False
        self.heard: Tensor | None = None
        self.averages = Kept()
        self.under_way: set[int] = set()

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

    def note(self, index: int, last: float | None, verdict: float, seen: float) -> None:
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

    def begin(self, index: int, statistics: Collection[str]) -> None:
        """Note that a layer is renewed from some of its `statistics` as they are now."""
        self.under_way.add(index)
        if self._drifts:
            blocks, names = self._stack.members[index].blocks, tuple(name for name in self.names if name in statistics)
            for name, own in self._stack.snapshot(blocks, names).items():
                self._kept().write(name, blocks, own)

    def end(self, index: int, *, failed: bool) -> None:
        """Note how that has ended; one that has `failed` is renewed at the next decision, whatever is measured."""
        self.under_way.discard(index)
        if failed:
            self._forget(index, _AGAIN)

    def _forget(self, index: int, numbers: tuple[float, ...]) -> None:
        """Have nothing to compare the next measurement with: by any measure the layer has changed."""
        self.under_way.discard(index)
        self._numbers[index] = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        for name in self.averages:
            self.averages[name][self._stack.members[index].blocks] = 0

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
        n, index = member.stop - member.start, self._stack.members.index(member)
        own = {_NUMBERS: self._numbers[index].expand(n, -1)}
        if self._drifts and self._stack.role.works:
            kept = self._kept()
            own |= {f"{_PREFIX}{name}": kept.whole(name, member.blocks) for name in kept}
        if index not in self.under_way:
            return own
        # A state leaves renewals under way out: who resumes begins them anew.
        blank = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
        return {**blank, _NUMBERS: torch.tensor(_AGAIN, dtype=torch.float64, device="cpu").expand(n, -1)}

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
        index = self._stack.members.index(member)
        if not all(name in given for name in self.shapes(member)):
            self._forget(index, _NOTHING)
            return
        self.under_way.discard(index)
        self._numbers[index] = given[_NUMBERS][0].to(self._numbers)
        if self._drifts and self._stack.role.works:
            kept = self._kept()
            for name in kept:
                kept.write_whole(name, member.blocks, given[f"{_PREFIX}{name}"].to(self._stack.device))
