"""Shards of gradients, or of what is shaped alike, (FSDP2) to the workers of their layers, in one message a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from natgrad.distributed import Communicator
from natgrad.distributed.shards import Holders, Piece, is_sharded
from natgrad.layers import Slot


def collect_rows(
    wanted: Iterable[tuple[Slot, tuple[int, ...]]],
    of: Callable[[Slot, range], Tensor],
    runtime: Communicator,
    kind: str,
) -> dict[int, list[Piece]]:
    """Give some ranks all rows of what is sharded as parameters are; nothing happens to the others.

    Args:
        wanted: Parameters, or parts of them, and who is to have the rows; the same on every rank.
        of: Returns rows that this rank holds, in the parameter's dtype.
        runtime: The ranks.
        kind: What is counted.

    Returns:
        The rows by the parameter's ``id``.
    """
    holders = Holders(runtime)
    kinds: dict[tuple[torch.device, torch.dtype], list[tuple[Slot, tuple[int, ...]]]] = {}
    for slot, receivers in wanted:
        if is_sharded(slot.parameter):
            kinds.setdefault((slot.parameter.device, slot.parameter.dtype), []).append((slot, receivers))
    gathered: dict[int, list[Piece]] = {}
    for (device, dtype), slots in kinds.items():
        _collect(slots, of, holders, runtime, torch.empty(0, dtype=dtype, device=device), kind, gathered)
    return gathered


def _collect(
    slots: list[tuple[Slot, tuple[int, ...]]],
    of: Callable[[Slot, range], Tensor],
    holders: Holders,
    runtime: Communicator,
    nothing: Tensor,
    kind: str,
    gathered: dict[int, list[Piece]],
) -> None:
    """Add the rows of parameters of one device and dtype to those `gathered`."""
    outgoing: list[list[Tensor]] = [[nothing] for _ in range(runtime.ranks)]
    places: list[list[tuple[int, int, int]]] = [[] for _ in range(runtime.ranks)]
    for slot, receivers in slots:
        parameter, own = slot.parameter, holders.rows(slot, runtime.rank)
        for worker in receivers:
            if worker != runtime.rank:
                if len(own) and holders.together(slot, worker, runtime.rank):
                    outgoing[worker].append(of(slot, own).reshape(-1))
                continue
            for peer in holders.peers(slot, worker):
                rows = holders.rows(slot, peer)
                if peer == worker:
                    gathered.setdefault(id(parameter), []).append((rows.start, of(slot, rows)))
                elif len(rows):
                    places[peer].append((id(parameter), rows.start, len(rows) * math.prod(parameter.shape[1:])))
    messages = [torch.cat(own) for own in outgoing]
    runtime.count({kind: sum(map(len, messages))}, nothing.element_size())
    arrived = runtime.redistribute(messages, [sum(size for *_, size in own) for own in places])
    for own_places, message in zip(places, arrived, strict=True):
        vectors = message.split([size for *_, size in own_places])
        for (key, start, _), vector in zip(own_places, vectors, strict=True):
            gathered.setdefault(key, []).append((start, vector))
