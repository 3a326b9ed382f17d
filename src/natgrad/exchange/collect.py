"""Shards of gradients (FSDP2) to the workers of their layers, in one message a step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from natgrad.exchange.vectors import Size, nbytes, swap
from natgrad.gradients.stacked import Gradients
from natgrad.layers import Slot
from natgrad.placement import Runtime
from natgrad.stacks.shards import Holders, Piece, held_rows, is_sharded


def collect(gradients: Gradients, runtime: Runtime) -> dict[int, list[Piece]]:
    """Give each worker all rows of the sharded gradients that it preconditions; nobody else gets them.

    The rows come from the ranks that hold them of the worker's own copy of the model: of S ranks that share it (under
    HSDP those of one replica, otherwise all) each sends a worker 1 / S of a layer's gradient, and itself nothing.

    Args:
        gradients: Of all layers on every rank.
        runtime: The ranks.

    Returns:
        What `natgrad.gradients.stacked.Entry.solve` takes: the rows by the parameter's ``id``.
    """
    holders = Holders(runtime)
    devices: dict[torch.device, list[tuple[Slot, tuple[int, ...]]]] = {}
    for entry in gradients.entries:
        for member in entry.members:
            for slot in member.layer.slots:
                if is_sharded(slot.parameter):
                    workers = entry.stack.role.seat.workers
                    devices.setdefault(slot.parameter.device, []).append((slot, workers))
    gathered: dict[int, list[Piece]] = {}
    for device, slots in devices.items():
        _collect(slots, holders, runtime, device, gathered)
    return gathered


def _collect(
    slots: list[tuple[Slot, tuple[int, ...]]],
    holders: Holders,
    runtime: Runtime,
    device: torch.device,
    gathered: dict[int, list[Piece]],
) -> None:
    outgoing: list[list[Tensor]] = [[] for _ in range(runtime.ranks)]
    expected: list[list[Size]] = [[] for _ in range(runtime.ranks)]
    places: list[list[tuple[int, int]]] = [[] for _ in range(runtime.ranks)]
    for slot, workers in slots:
        parameter, own = slot.parameter, holders.rows(slot, runtime.rank)
        for worker in workers:
            if worker != runtime.rank:
                if len(own) and holders.together(slot, worker, runtime.rank):
                    outgoing[worker].append(_values(slot, own))
                continue
            for peer in holders.peers(slot, worker):
                rows = holders.rows(slot, peer)
                if peer == worker:
                    gathered.setdefault(id(parameter), []).append((rows.start, _values(slot, rows)))
                elif len(rows):
                    expected[peer].append((len(rows) * math.prod(parameter.shape[1:]), parameter.dtype))
                    places[peer].append((id(parameter), rows.start))
    runtime.count({"gradients": sum(map(nbytes, outgoing))})
    for own_places, vectors in zip(places, swap(runtime, outgoing, expected, device), strict=True):
        for (key, start), vector in zip(own_places, vectors, strict=True):
            gathered.setdefault(key, []).append((start, vector))


def _values(slot: Slot, rows: range) -> Tensor:
    """Return rows of the gradient, zeros where there is none, as all ranks expect them: in the parameter's dtype."""
    values, parameter = held_rows(slot, rows), slot.parameter
    if values is None:
        return torch.zeros(len(rows), *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    return values.to(parameter.dtype)
