"""Gradients between the parameters' ``.grad`` and the stacks: gathered, preconditioned, given back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from natgrad.blocks import Member, Stack
from natgrad.linalg import tensor_on


@dataclass
class Entry:
    """The gradients of those layers of a stack that have one, and whose curvature is ready or else is not.

    Attributes:
        stack: The stack.
        members: The layers.
        ready: Whether there is curvature.
        V: Preconditioned gradients ``[N, o, i]``, once solved; the raw ones W where there is no curvature yet.
        inner: ⟨V, W⟩ of each block ``[N]``; not finite where the gradient is not.
    """

    stack: Stack
    members: list[Member]
    ready: bool
    V: Tensor = field(init=False)
    inner: Tensor = field(init=False)

    def solve(self, damping: float) -> None:
        """Gather the raw gradients and precondition them; a missing one of two (weight, bias) counts as zero."""
        stack = self.stack
        W = torch.empty(sum(self.blocks), stack.outputs, stack.inputs, dtype=stack.solve_dtype, device=stack.device)
        targets, sources = [], []
        for gradient, view in _views(self.members, W):
            if gradient is None:
                view.zero_()
            else:
                targets.append(view)
                sources.append(gradient)
        torch._foreach_copy_(targets, sources)
        self.V = stack.curvature.solve(self.held(), W, damping) if self.ready else W
        self.inner = torch.bmm(self.V.flatten(1)[:, None, :], W.flatten(1)[:, :, None])[:, 0, 0]

    @property
    def blocks(self) -> list[int]:
        """The number of blocks of each layer."""
        return [member.stop - member.start for member in self.members]

    def places(self) -> list[int] | None:
        """Return where in the stack these blocks are; None: they are all of it."""
        if len(self.members) == len(self.stack.members):
            return None
        return [block for member in self.members for block in range(member.start, member.stop)]

    def held(self) -> dict[str, Tensor]:
        """Return what the solve needs, of these blocks only."""
        places = self.places()
        if places is None:
            return self.stack.held
        index = tensor_on(self.stack.device, places)
        return {name: tensor.index_select(0, index) for name, tensor in self.stack.held.items()}

    def scale_(self, scale: float | Tensor, fine: Tensor) -> None:
        """Multiply V by `scale`, and by zero where not `fine` ``[N]``."""
        if fine.device.type != "cpu" or not bool(fine.all()):
            # A product would keep the NaN.
            self.V = torch.where(fine[:, None, None], self.V, 0)
        if isinstance(scale, Tensor) or scale != 1.0:
            self.V.mul_(scale)


class Gradients:
    """The gradients of one step.

    Attributes:
        entries: One for each stack with something to precondition.
    """

    def __init__(self, entries: list[Entry]) -> None:
        """Wrap `entries`."""
        self.entries = entries

    @classmethod
    def take(cls, stacks: list[Stack]) -> Gradients:
        """Find every layer with a ``.grad``."""
        entries = []
        for stack, usable in product(stacks, (True, False)):
            pairs = zip(stack.members, stack.ready, strict=True)
            members = [member for member, ready in pairs if ready == usable and _has_gradient(member)]
            if members:
                entries.append(Entry(stack, members, usable))
        return cls(entries)

    def solve(self, damping: float) -> None:
        """Precondition every stack; what has no curvature yet stays a plain gradient."""
        for entry in self.entries:
            entry.solve(damping)

    def give(self) -> None:
        """Write the preconditioned gradients into ``.grad``, in place."""
        targets, sources = [], []
        for entry in self.entries:
            for gradient, view in _views(entry.members, entry.V):
                if gradient is not None:
                    targets.append(gradient)
                    sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)


def _has_gradient(member: Member) -> bool:
    return any(slot.parameter.grad is not None for slot in member.layer.slots)


def _views(members: list[Member], stacked: Tensor) -> Iterator[tuple[Tensor | None, Tensor]]:
    """Yield the gradient of each parameter with its place in `stacked`, shaped alike."""
    start = 0
    for member in members:
        layer, stop = member.layer, start + member.stop - member.start
        for slot in layer.slots:
            parameter = slot.parameter
            gradient, view = layer.align(
                slot, parameter if parameter.grad is None else parameter.grad, stacked[start:stop, :, slot.columns]
            )
            yield None if parameter.grad is None else gradient, view
        start = stop
