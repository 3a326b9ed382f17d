"""Gradients that natgrad reduces, each to the one worker of its layer: stage 3 of Osawa 2020, in one message a step.

With the preconditioned gradients that the workers send back, N_g elements go from every rank to the workers and from
these to every rank: 2 (P - 1) N_g in all, as in the all-reduce of plain data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from natgrad.blocks import Stack
from natgrad.exchange.vectors import Size, nbytes, swap
from natgrad.linalg import tensor_on
from natgrad.placement import Runtime, flatten, unflatten
from natgrad.precision import at_least_float32


@dataclass(frozen=True)
class _Part:
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
class _Route:
    """What of one dtype is summed where.

    Attributes:
        covered: For each rank the parts of its layers.
        left: The parts that no layer covers: end to end they are cut into a piece for each rank.
    """

    covered: list[list[_Part]]
    left: list[_Part]

    @cached_property
    def cut(self) -> list[int]:
        """How many elements of `left` each rank sums: equally many, up to one."""
        ranks = len(self.covered)
        total = sum(part.values.numel() for part in self.left)
        return [total * (rank + 1) // ranks - total * rank // ranks for rank in range(ranks)]

    def addends(self) -> list[list[Tensor]]:
        """Return for each rank what this one adds to the sums of that one."""
        sizes = self.cut
        pieces: Iterable[Tensor] = flatten([part.addend for part in self.left]).split(sizes) if self.left else ()
        own = [[part.addend for part in parts] for parts in self.covered]
        return [[*addends, piece] for addends, piece in zip(own, pieces, strict=True)] if self.left else own

    def numel(self, rank: int) -> int:
        """Return how many elements `rank` sums."""
        return sum(part.values.numel() for part in self.covered[rank]) + self.cut[rank]


@dataclass
class _Rest:
    """The gradients of one device and dtype that are left to the optimizer, of which this rank has summed a piece."""

    parts: list[_Part]
    sizes: list[int]
    piece: Tensor


class Left:
    """The gradients of parameters that no layer covers, which go to all ranks with the preconditioned ones."""

    def __init__(self) -> None:
        """Begin with none."""
        self.devices: list[torch.device] = []
        self._rests: dict[torch.device, list[_Rest]] = {}

    def add(self, device: torch.device, routes: dict[torch.dtype, _Route], pieces: dict[torch.dtype, Tensor]) -> None:
        """Note what this rank has summed on a device."""
        self.devices.append(device)
        self._rests[device] = [
            _Rest(routes[dtype].left, routes[dtype].cut, piece) for dtype, piece in pieces.items() if routes[dtype].left
        ]

    def own(self, device: torch.device) -> list[Tensor]:
        """Return the pieces that this rank has summed."""
        return [rest.piece for rest in self._rests.get(device, [])]

    def expected(self, device: torch.device, rank: int) -> list[Size]:
        """Return what `rank` has summed."""
        return [(rest.sizes[rank], rest.piece.dtype) for rest in self._rests.get(device, [])]

    def give(self, device: torch.device, arrived: Sequence[Sequence[Tensor]]) -> None:
        """Write the pieces of all ranks into ``.grad``."""
        for rest, pieces in zip(self._rests.get(device, []), zip(*arrived, strict=True), strict=True):
            _write(rest.parts, torch.cat(pieces))


def reduce_to_workers(
    model: nn.Module, stacks: Sequence[Stack], runtime: Runtime, samples: int, *, summed: bool
) -> tuple[float | Tensor, Left]:
    """Make ``.grad`` of each layer that of the loss over all ranks' samples, on its one worker.

    Elsewhere it stays what it was, but where there is none though another rank has one it becomes zero. The sums are
    made in at least float32, in the order of the ranks, by one rank each.

    Args:
        model: The model; all its trained parameters take part.
        stacks: Its covered layers, each with one worker.
        runtime: The ranks.
        samples: This rank's samples (token losses: positions) of the step.
        summed: Whether the loss sums over samples; otherwise it is a mean.

    Returns:
        What makes the result the gradient of the mean loss, 1 for a mean loss and 1 / (all samples) for a sum; and the
        sums that no worker takes.
    """
    scale: float | Tensor = 1.0
    left = Left()
    for device, routes in _routes(model, stacks, runtime.ranks).items():
        total, pieces = _reduce(device, routes, runtime, samples, summed=summed)
        left.add(device, routes, pieces)
        if summed:
            scale = 1.0 / total
    return scale, left


def _routes(model: nn.Module, stacks: Sequence[Stack], ranks: int) -> dict[torch.device, dict[torch.dtype, _Route]]:
    """Return what is summed where, by device and dtype, in the order of the model."""
    workers: dict[int, list[tuple[slice | None, int]]] = {}
    for stack in stacks:
        for member in stack.members:
            for slot in member.layer.slots:
                workers.setdefault(id(slot.parameter), []).append((slot.rows, stack.role.server))
    devices: dict[torch.device, dict[torch.dtype, _Route]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        routes = devices.setdefault(parameter.device, {})
        route = routes.setdefault(parameter.dtype, _Route([[] for _ in range(ranks)], []))
        known, end = workers.get(id(parameter)), 0
        if known is None:
            route.left.append(_Part(parameter))
            continue
        for rows, worker in sorted(known, key=lambda part: 0 if part[0] is None else part[0].start):
            if rows is not None and rows.start > end:  # another layer's, which is left out
                route.left.append(_Part(parameter, slice(end, rows.start)))
            route.covered[worker].append(_Part(parameter, rows))
            end = len(parameter) if rows is None else rows.stop
        if end < len(parameter):
            route.left.append(_Part(parameter, slice(end, len(parameter))))
    return devices


def _reduce(
    device: torch.device, routes: dict[torch.dtype, _Route], runtime: Runtime, samples: int, *, summed: bool
) -> tuple[Tensor, dict[torch.dtype, Tensor]]:
    """Send addends to who sums them; return the samples of all ranks, and what is summed here of what is left."""
    parameters = {id(part.parameter): part.parameter for route in routes.values() for part in _parts(route)}
    used = [parameter.grad is not None for parameter in parameters.values()]
    flags = tensor_on(device, used, torch.uint8)
    counters = [tensor_on(device, [samples], torch.int64), flags]
    addends = {dtype: route.addends() for dtype, route in routes.items()}
    me, others = runtime.rank, runtime.ranks - 1
    outgoing = [
        [] if rank == me else [*counters, *(tensor for own in addends.values() for tensor in own[rank])]
        for rank in range(runtime.ranks)
    ]
    expected: list[Size] = [(1, torch.int64), (len(flags), torch.uint8)]
    expected += [(route.numel(me), dtype) for dtype, route in routes.items()]
    counted = nbytes(counters) * others
    runtime.count({"gradients": sum(map(nbytes, outgoing)) - counted, "counters": counted})
    arrived = swap(runtime, outgoing, [[] if rank == me else expected for rank in range(runtime.ranks)], device)
    arrived[me] = [
        *counters,
        *(flatten(own[me]) if own[me] else flags.new_empty(0, dtype=dtype) for dtype, own in addends.items()),
    ]
    counts = torch.cat([vectors[0] for vectors in arrived])
    total = counts.sum()
    if not all(used):
        # Only a rank that lacks a gradient asks whether another has it: that costs a synchronisation.
        users = torch.stack([vectors[1] for vectors in arrived]).amax(0).tolist()
        for parameter, user in zip(parameters.values(), users, strict=True):
            if parameter.grad is None and user:
                parameter.grad = torch.zeros_like(parameter)
    # Where no rank has seen any samples (derivatives with a graph), all weigh alike.
    weights = torch.ones_like(counts) if summed else torch.where(total > 0, counts, 1)
    pieces = {}
    for index, (dtype, route) in enumerate(routes.items(), start=2):
        result = _average([vectors[index] for vectors in arrived], weights, 1 if summed else weights.sum())
        own, piece = result.split([len(result) - route.cut[me], route.cut[me]])
        _write(route.covered[me], own)
        pieces[dtype] = piece
    wide = torch.float64 if torch.float64 in routes else torch.float32
    return total.clamp(min=1).to(wide), pieces


def _average(addends: Sequence[Tensor], weights: Tensor, divisor: Tensor | int) -> Tensor:
    """Return the sum of the addends ``[n]`` of all ranks, weighted by whole numbers ``[P]`` over a divisor."""
    dtype, wide = addends[0].dtype, at_least_float32(addends[0].dtype)
    result = addends[0].new_zeros(len(addends[0]), dtype=wide)
    for addend, weight in zip(addends, (weights.to(wide) / divisor).unbind(), strict=True):
        result.addcmul_(addend.to(wide), weight)
    return result.to(dtype)


def _parts(route: _Route) -> Iterable[_Part]:
    return [*(part for parts in route.covered for part in parts), *route.left]


def _write(parts: Sequence[_Part], summed: Tensor) -> None:
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
