"""Which rank sums what of the gradients: a layer's worker its own, and all ranks a piece of what no layer covers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from natgrad.exchange.vectors import Size
from natgrad.placement import flatten, unflatten
from natgrad.stacks.blocks import Stack

# Where a tensor is, and in which dtype: what travels together is alike in both.
Kind = tuple[torch.device, torch.dtype]


@dataclass(frozen=True)
class Part:
    """A trained parameter, or some of its rows: those of one layer, or of none.

    Attributes:
        parameter: The parameter.
        rows: Which of its rows; None: all of them.
    """

    parameter: nn.Parameter
    rows: slice | None = None

    @property
    def values(self) -> Tensor:
        """The values."""
        return self.parameter if self.rows is None else self.parameter[self.rows]

    @property
    def gradient(self) -> Tensor | None:
        """Their gradient, if there is one."""
        gradient = self.parameter.grad
        return gradient if gradient is None or self.rows is None else gradient[self.rows]

    @property
    def addend(self) -> Tensor:
        """What this rank adds to their gradient."""
        gradient = self.gradient
        return torch.zeros_like(self.values) if gradient is None else gradient.to(self.parameter.dtype)


@dataclass
class Route:
    """What of one device and dtype is summed where.

    Attributes:
        covered: For each rank the parts of its layers.
        left: The parts that no layer covers: end to end they are cut into a piece for each rank.
    """

    covered: list[list[Part]]
    left: list[Part]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, each once."""
        parts = [*(part for parts in self.covered for part in parts), *self.left]
        return list({id(part.parameter): part.parameter for part in parts}.values())

    @cached_property
    def kind(self) -> Kind:
        """The device and dtype."""
        parameter = self.parameters[0]
        return parameter.device, parameter.dtype

    @cached_property
    def cut(self) -> list[int]:
        """How many elements of `left` each rank sums: equally many, up to one."""
        ranks = len(self.covered)
        total = sum(part.values.numel() for part in self.left)
        return [total * (rank + 1) // ranks - total * rank // ranks for rank in range(ranks)]

    @cached_property
    def sizes(self) -> list[int]:
        """How many elements each rank sums."""
        return [
            sum(part.values.numel() for part in parts) + piece
            for parts, piece in zip(self.covered, self.cut, strict=True)
        ]

    def addends(self) -> list[list[Tensor]]:
        """Return for each rank what this one adds to the sums of that one."""
        pieces: Iterable[Tensor] = flatten([part.addend for part in self.left]).split(self.cut) if self.left else ()
        own = [[part.addend for part in parts] for parts in self.covered]
        return [[*addends, piece] for addends, piece in zip(own, pieces, strict=True)] if self.left else own

    def write(self, rank: int, summed: Tensor) -> Tensor:
        """Write what `rank` has summed of its layers into their gradients; return its piece of what none covers."""
        own = self.sizes[rank] - self.cut[rank]
        _write(self.covered[rank], summed[:own])
        return summed[own:]


def routes(parameters: Iterable[nn.Parameter], stacks: Sequence[Stack], ranks: int) -> list[Route]:
    """Return what is summed where of some parameters, one for each device and dtype, in the order of the parameters.

    Args:
        parameters: Trained parameters of the model.
        stacks: Its covered layers, each with one worker.
        ranks: P.
    """
    workers: dict[int, list[tuple[slice | None, int]]] = {}
    for stack in stacks:
        for member in stack.members:
            for slot in member.layer.slots:
                workers.setdefault(id(slot.parameter), []).append((slot.rows, stack.role.server))
    found: dict[Kind, Route] = {}
    for parameter in parameters:
        kind = parameter.device, parameter.dtype
        route = found.setdefault(kind, Route([[] for _ in range(ranks)], []))
        known, end = workers.get(id(parameter)), 0
        if known is None:
            route.left.append(Part(parameter))
            continue
        for rows, worker in sorted(known, key=lambda part: 0 if part[0] is None else part[0].start):
            if rows is not None and rows.start > end:  # another layer's, which is left out
                route.left.append(Part(parameter, slice(end, rows.start)))
            route.covered[worker].append(Part(parameter, rows))
            end = len(parameter) if rows is None else rows.stop
        if end < len(parameter):
            route.left.append(Part(parameter, slice(end, len(parameter))))
    return list(found.values())


class Left:
    """The gradients of parameters that no layer covers, which go to all ranks with the preconditioned ones."""

    def __init__(self) -> None:
        """Begin with none."""
        self._rests: dict[torch.device, list[tuple[Route, Tensor]]] = {}

    @property
    def devices(self) -> list[torch.device]:
        """Where there are any gradients."""
        return list(self._rests)

    def add(self, device: torch.device, pieces: Sequence[tuple[Route, Tensor]]) -> None:
        """Note the pieces that this rank has summed on a device."""
        self._rests[device] = [(route, piece) for route, piece in pieces if route.left]

    def own(self, device: torch.device) -> list[Tensor]:
        """Return the pieces that this rank has summed."""
        return [piece for _, piece in self._rests.get(device, [])]

    def expected(self, device: torch.device, rank: int) -> list[Size]:
        """Return what `rank` has summed."""
        return [(route.cut[rank], piece.dtype) for route, piece in self._rests.get(device, [])]

    def give(self, device: torch.device, arrived: Sequence[Sequence[Tensor]]) -> None:
        """Write the pieces of all ranks into ``.grad``."""
        for (route, _), pieces in zip(self._rests.get(device, []), zip(*arrived, strict=True), strict=True):
            _write(route.left, torch.cat(pieces))


def _write(parts: Sequence[Part], summed: Tensor) -> None:
    """Write sums into the gradients of some parts; what no rank has a gradient of has none here either."""
    if not parts:
        return
    values = unflatten(summed, [part.values for part in parts])
    pairs = [
        (gradient, value) for part, value in zip(parts, values, strict=True) if (gradient := part.gradient) is not None
    ]
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(list(targets), list(sources))
