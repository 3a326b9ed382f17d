"""Preconditioned gradients from the workers of their layers to the other ranks of their row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from natgrad.distributed import Communicator, Plan
from natgrad.distributed.fsdp import Holders, is_sharded, pairs
from natgrad.layers import Slot
from natgrad.linalg import tensor_on
from natgrad.preconditioner.gradients.owners import OwnedGradients
from natgrad.preconditioner.gradients.stacked import Entry, Gradients, Share
from natgrad.preconditioner.guard.guard import FailureCounters
from natgrad.state.block_group import LayerBlocks


@dataclass
class _Bucket:
    """Gradients of one device and dtype, sent together.

    Attributes:
        entries: Gradients of layers, each preconditioned by one rank of the row.
        uncovered: Gradients of parameters without curvature, of which each rank has summed a part.
    """

    entries: list[Entry] = field(default_factory=list)
    uncovered: list[OwnedGradients] = field(default_factory=list)


def share(
    gradients: Gradients,
    plan: Plan[str],
    runtime: Communicator,
    watch: FailureCounters,
    uncovered: Sequence[OwnedGradients] = (),
) -> None:
    """Send the preconditioned gradients of all layers to every rank, or the rows that it holds (FSDP2).

    Each worker sends V and ⟨V, W⟩ of every block to the other ranks of its row, and for every layer its fallback level
    and its number of failures, so that all ranks decide alike.

    Args:
        gradients: Of all layers on every rank, preconditioned where this rank is a worker.
        plan: The workers.
        runtime: The ranks.
        watch: Counts the failures of all layers.
        uncovered: Reduced gradients of parameters without curvature. Every layer then has one worker.
    """
    buckets: dict[tuple[torch.device, torch.dtype], _Bucket] = {}
    for group in uncovered:
        buckets.setdefault((group.device, group.dtype), _Bucket()).uncovered.append(group)
    for entry in gradients.entries:
        buckets.setdefault((entry.group.device, entry.group.work_dtype), _Bucket()).entries.append(entry)
    holders, row = Holders(runtime), plan.row(runtime.rank)
    runtime.subgroup(row)
    for (device, dtype), bucket in buckets.items():
        empty = torch.empty(0, dtype=dtype, device=device)
        slots = (slot for entry in bucket.entries for member in entry.members for slot in member.layer.slots)
        if any(is_sharded(slot.parameter) for slot in slots):
            _share_rows(bucket, empty, row, runtime, holders, watch)
        else:
            _share_whole(bucket, empty, row, runtime, watch)


def _share_whole(
    bucket: _Bucket, empty: Tensor, row: Sequence[int], runtime: Communicator, watch: FailureCounters
) -> None:
    """Exchange whole gradients."""
    entries = {rank: [entry for entry in bucket.entries if entry.group.role.server == rank] for rank in row}
    own = entries[runtime.rank]
    values = [
        *(entry.V.reshape(-1) for entry in own),
        *(group.piece for group in bucket.uncovered if group.piece is not None),
    ]
    counters = [empty, *(_counters(entry, watch) for entry in own)]
    sizes = {rank: [_numel(entry) for entry in entries[rank]] for rank in row}
    pieces = {rank: [group.pieces[rank] for group in bucket.uncovered] for rank in row}
    counts = {rank: [_counter_count(entry) for entry in entries[rank]] for rank in row}
    totals = [(sum(sizes[rank]) + sum(pieces[rank]), sum(counts[rank])) for rank in row]
    shared = runtime.share_from_owners(
        (torch.cat([empty, *values]), torch.cat(counters)), totals, "gradients", ranks=row
    )
    summed = []
    for rank, (their_values, their_counters) in zip(row, shared, strict=True):
        vectors = their_values.split([*sizes[rank], *pieces[rank]])
        numbers = their_counters.split(counts[rank])
        summed.append(vectors[len(sizes[rank]) :])
        for entry, vector, told in zip(entries[rank], vectors, numbers, strict=False):
            if rank != runtime.rank:
                entry.V = vector.view(entry.group.size, entry.group.outputs, entry.group.inputs)
            _hear(entry, told, watch)
    for group, own_pieces in zip(bucket.uncovered, zip(*summed, strict=True), strict=True):
        group.write_uncovered(own_pieces)


def _share_rows(
    bucket: _Bucket,
    empty: Tensor,
    row: Sequence[int],
    runtime: Communicator,
    holders: Holders,
    watch: FailureCounters,
) -> None:
    """Send each rank of the row the rows that it holds (FSDP2)."""
    me, entries = runtime.rank, bucket.entries
    own = [entry for entry in entries if entry.group.role.is_gradient_worker]
    told = [_counters(entry, watch) for entry in own]
    for entry in own:
        entry.clear_(~entry.inner.isfinite())  # a rank that receives some rows does not know their blocks
    counters = torch.cat([empty, *told])
    outgoing = [
        torch.cat([counters, *(value for entry in own for value in _values(entry, holders, rank))])
        if rank != me
        else empty
        for rank in row
    ]
    sizes: dict[int, list[int]] = {rank: [] for rank in row}
    theirs: dict[int, list[Entry]] = {rank: [] for rank in row}
    for entry in entries:
        server = entry.group.role.server
        if server != me:
            theirs[server].append(entry)
    for rank in row:
        sizes[rank] += [_counter_count(entry) for entry in theirs[rank]]
        sizes[rank] += [size for entry in theirs[rank] for size in _value_sizes(entry, holders, me)]
    counted = len(counters) * (len(row) - 1)
    runtime.count({"gradients": sum(map(len, outgoing)) - counted, "counters": counted}, counters.element_size())
    received = runtime.redistribute(outgoing, [sum(sizes[rank]) for rank in row], ranks=row)
    for rank, message in zip(row, received, strict=True):
        if rank == me:
            continue
        vectors = message.split(sizes[rank])
        values = iter(vectors[len(theirs[rank]) :])
        for entry, numbers in zip(theirs[rank], vectors, strict=False):
            shares = _shares(entry, holders, me)
            if shares:
                entry.shares = [Share(slot, rows, member.start, next(values)) for member, slot, rows in shares]
            else:
                entry.V = next(values).view(entry.group.size, entry.group.outputs, entry.group.inputs)
            _hear(entry, numbers, watch)
    for entry, numbers in zip(own, told, strict=True):
        _hear(entry, numbers, watch)


def _shares(entry: Entry, holders: Holders, rank: int) -> list[tuple[LayerBlocks, Slot, range]]:
    """Return the rows of the parameters that `rank` holds. Empty: no parameter is sharded, and it holds all rows."""
    slots = [(member, slot) for member in entry.members for slot in member.layer.slots]
    if not any(is_sharded(slot.parameter) for _, slot in slots):
        return []
    return [(member, slot, holders.rows(slot, rank)) for member, slot in slots]


def _values(entry: Entry, holders: Holders, rank: int) -> list[Tensor]:
    """Return the part of V to send to `rank`, as vectors."""
    shares = _shares(entry, holders, rank)
    values = [entry.V.new_empty(_row_numel(slot, rows)) for _, slot, rows in shares]
    targets, sources = [], []
    for (member, slot, rows), value in zip(shares, values, strict=True):
        blocks = entry.V[member.blocks, :, slot.columns]
        for part, place in pairs(member.layer, slot, [(rows.start, value)], blocks):
            targets.append(part)
            sources.append(place)
    if targets:
        torch._foreach_copy_(targets, sources)
    return values if shares else [entry.V.reshape(-1)]


def _value_sizes(entry: Entry, holders: Holders, rank: int) -> list[int]:
    shares = _shares(entry, holders, rank)
    return [_row_numel(slot, rows) for _, slot, rows in shares] if shares else [_numel(entry)]


def _numel(entry: Entry) -> int:
    return entry.group.size * entry.group.outputs * entry.group.inputs


def _row_numel(slot: Slot, rows: range) -> int:
    return len(rows) * math.prod(slot.parameter.shape[1:])


def _counter_count(entry: Entry) -> int:
    group = entry.group
    return group.size + 2 * len(group.members) + (0 if group.decisions is None else group.decisions.message_size)


def _counters(entry: Entry, watch: FailureCounters) -> Tensor:
    group, like = entry.group, entry.inner
    ready = entry.told()
    if isinstance(ready, bool):
        ready = like.new_full((len(group.members),), float(ready))
    verdicts = [] if group.decisions is None or not group.decisions.is_sent else [group.decisions.message(like)]
    return torch.cat([like, ready, watch.trouble(group).to(like), *verdicts])


def _hear(entry: Entry, counters: Tensor, watch: FailureCounters) -> None:
    """Apply the counters that a worker sent, also on the worker itself, so that all ranks decide alike."""
    group, layers = entry.group, len(entry.group.members)
    told = group.size + 2 * layers
    entry.inner, ready, trouble, verdicts = counters.split([group.size, layers, layers, len(counters) - told])
    if group.decisions is not None:
        group.decisions.received = verdicts if len(verdicts) else None
    repeats = tensor_on(group.device, entry.blocks)
    entry.ready = ready.repeat_interleave(repeats, output_size=group.size)
    watch.heard(group, trouble.repeat_interleave(repeats, output_size=group.size))
