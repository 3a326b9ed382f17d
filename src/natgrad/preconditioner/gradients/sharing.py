"""Preconditioned gradients from the workers of their layers to the other ranks of their row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from natgrad.distributed import Communicator, Plan
from natgrad.distributed.buckets import LEAST_MESSAGES, Slices
from natgrad.distributed.fsdp import Holders, from_blocks
from natgrad.layers import Layer, Slot
from natgrad.linalg import tensor_on
from natgrad.preconditioner.gradients.stacked import GroupGradients, HeldRows, has_shards, places
from natgrad.preconditioner.guard.guard import FailureCounters


def share(
    entries: Iterable[GroupGradients],
    plan: Plan[str],
    runtime: Communicator,
    failure_counters: FailureCounters,
    *,
    padded: bool = False,
) -> list[tuple[list[GroupGradients], Callable[[], None]]]:
    """Start to send the preconditioned gradients of all layers to every rank, or the rows that it holds (FSDP2).

    Each worker sends V and ⟨V, W⟩ of every block to the other ranks of its row, and for every layer its level and its
    number of failures, so that all ranks decide alike. While `entries` are computed, earlier ones are being sent. If
    `padded`, messages are padded where that adds little, rather than evened out while the host waits.

    Returns:
        For each message its entries, which are complete once the function beside them has been called.
    """
    holders, row = Holders(runtime), plan.row(runtime.rank)
    runtime.subgroup(row)
    least = sum(layer.gradients for layer in plan.layers.values()) // LEAST_MESSAGES
    buckets: dict[tuple[object, ...], list[GroupGradients]] = {}
    posted: list[tuple[list[GroupGradients], Callable[[], None]]] = []

    def post(bucket: list[GroupGradients], owned: Slices) -> None:
        if has_shards(bucket[0].group):
            finish = _share_rows(bucket, row, runtime, holders, failure_counters)
        else:
            pads = padded and owned.pads_little
            finish = _share_whole(bucket, row, runtime, failure_counters, padded=pads)
        posted.append((bucket, finish))

    def owned_of(bucket: list[GroupGradients]) -> Slices:
        return Slices(tuple(sum(_numel(one) for one in bucket if one.group.role.server == rank) for rank in row))

    for entry in entries:
        if entry.group.role.is_gradient_worker:
            entry.V = entry.V.to(entry.sent).to(entry.dtype)  # as it arrives
        bucket = buckets.setdefault(_kind(entry), [])
        bucket.append(entry)
        owned = owned_of(bucket)
        if owned.total >= least and (owned.pads_little if padded else owned.is_nearly_even):
            post(buckets.pop(_kind(entry)), owned)
    for bucket in buckets.values():
        post(bucket, owned_of(bucket))
    return posted


def in_order(entries: Iterable[GroupGradients], layers: Sequence[Layer]) -> list[GroupGradients]:
    """Return the gradients of each layer apart, in the order of the layers."""
    order = {layer.key: number for number, layer in enumerate(layers)}
    parts = (part for entry in entries for part in entry.by_layer())
    return sorted(parts, key=lambda part: order[part.members[0].layer.key])


def _kind(entry: GroupGradients) -> tuple[object, ...]:
    """Return what the entries of a message have in common."""
    return entry.device, entry.dtype, entry.sent, has_shards(entry.group)


def _share_whole(
    bucket: Sequence[GroupGradients],
    row: Sequence[int],
    runtime: Communicator,
    failure_counters: FailureCounters,
    *,
    padded: bool,
) -> Callable[[], None]:
    """Start to exchange whole gradients, each followed by its counters; return a function that receives them."""
    entries = {rank: [entry for entry in bucket if entry.group.role.server == rank] for rank in row}
    own = [(entry, _counters(entry, failure_counters)) for entry in entries[runtime.rank]]
    sent = bucket[0].sent
    parts = [part for entry, numbers in own for part in (entry.V.reshape(-1).to(sent), numbers.view(sent))]
    local = torch.cat([torch.empty(0, dtype=sent, device=bucket[0].device), *parts])
    sizes = {rank: [n for entry in entries[rank] for n in (_numel(entry), _counter_count(entry))] for rank in row}
    lengths = [sum(sizes[rank]) for rank in row]
    work = runtime.post_from_owners(local, lengths, "gradients", ranks=row, padded=padded)

    def finish() -> None:
        for rank, vector in zip(row, work.wait(), strict=True):
            pieces = iter(vector.split(sizes[rank]))
            for entry in entries[rank] if rank != runtime.rank else ():
                shape = entry.size, entry.group.outputs, entry.group.inputs
                entry.V = next(pieces).view(shape).to(entry.dtype)
                _receive_counters(entry, _numbers(next(pieces), entry.dtype), failure_counters)
        for entry, numbers in own:
            _receive_counters(entry, numbers, failure_counters)

    return finish


def _share_rows(
    entries: Sequence[GroupGradients],
    row: Sequence[int],
    runtime: Communicator,
    holders: Holders,
    failure_counters: FailureCounters,
) -> Callable[[], None]:
    """Start to send each rank of the row the rows that it holds (FSDP2); return a function that receives them."""
    workers = [entry for entry in entries if entry.group.role.is_gradient_worker]
    own = [_counters(entry, failure_counters) for entry in workers]
    sent = entries[0].sent
    counters = torch.cat([torch.empty(0, dtype=entries[0].dtype, device=entries[0].device), *own]).view(sent)
    for entry in workers:
        entry.clear_(~entry.inner.isfinite())  # a rank that receives some rows does not know their blocks
    whole = {id(entry): _whole(entry) for entry in workers}
    outgoing = [
        torch.cat(
            [counters, *(part for entry in workers for part in _values_for(rank, entry, whole[id(entry)], holders))]
        )
        if rank != runtime.rank
        else counters[:0]
        for rank in row
    ]
    incoming = {rank: [entry for entry in entries if entry.group.role.server == rank != runtime.rank] for rank in row}
    slots = {id(entry): _held_slots(runtime.rank, entry, holders) for some in incoming.values() for entry in some}
    sizes = {
        rank: [
            *(_counter_count(entry) for entry in incoming[rank]),
            *(
                len(rows) * math.prod(slot.parameter.shape[1:])
                for entry in incoming[rank]
                for _, slot, rows in slots[id(entry)]
            ),
        ]
        for rank in row
    }
    runtime.count("gradients", sum(message.nbytes for message in outgoing))
    work = runtime.post_redistribute(outgoing, [sum(sizes[rank]) for rank in row], "gradients", ranks=row)

    def finish() -> None:
        for rank, message in zip(row, work.wait(), strict=True):
            vectors = message.split(sizes[rank])
            values = iter(vectors[len(incoming[rank]) :])
            for entry, numbers in zip(incoming[rank], vectors, strict=False):
                entry.held = [
                    HeldRows(slot, rows, block, next(values).to(entry.dtype)) for block, slot, rows in slots[id(entry)]
                ]
                _receive_counters(entry, _numbers(numbers, entry.dtype), failure_counters)
        for entry, numbers in zip(workers, own, strict=True):
            _receive_counters(entry, numbers, failure_counters)

    return finish


def _held_slots(rank: int, entry: GroupGradients, holders: Holders) -> list[tuple[int, Slot, range]]:
    """Return the rows of the parameters that `rank` holds, and the first block of each one's layer in V."""
    first = [sum(entry.counts[:place]) for place in range(len(entry.members))]
    slots = [(b, slot) for b, member in zip(first, entry.members, strict=True) for slot in member.layer.slots]
    return [(block, slot, holders.rows(slot, rank)) for block, slot in slots]


def _whole(entry: GroupGradients) -> list[Tensor]:
    """Return V as tensors shaped as the parameters."""
    return [from_blocks(layer, slot, blocks) for layer, slot, blocks in places(entry.members, entry.V)]


def _values_for(rank: int, entry: GroupGradients, whole: Sequence[Tensor], holders: Holders) -> list[Tensor]:
    """Return the part of V to send to `rank`, as vectors."""
    slots = _held_slots(rank, entry, holders)
    rows = [tensor[rows.start : rows.stop] for tensor, (*_, rows) in zip(whole, slots, strict=True)]
    return [part.reshape(-1).to(entry.sent) for part in rows]


def _numel(entry: GroupGradients) -> int:
    return entry.size * entry.group.outputs * entry.group.inputs


def _counter_count(entry: GroupGradients) -> int:
    """Return how many numbers of the dtype of a message the counters take: their bits are sent as they are."""
    return (entry.size + 2 * len(entry.members)) * entry.dtype.itemsize // entry.sent.itemsize


def _numbers(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return counters from their bits in a message; copied, as these may begin at any place."""
    return bits.clone().view(dtype)


def _counters(entry: GroupGradients, failure_counters: FailureCounters) -> Tensor:
    """Return ⟨V, W⟩ of each block, and the level and the failures of each layer."""
    assert not isinstance(entry.levels, Tensor)  # this rank is a worker
    levels = tensor_on(entry.device, entry.levels, entry.inner.dtype)
    failures = failure_counters.refresh_failures(entry.group, entry.members)
    return torch.cat([entry.inner, levels, failures.to(entry.inner)])


def _receive_counters(entry: GroupGradients, counters: Tensor, failure_counters: FailureCounters) -> None:
    """Apply the counters that a worker sent, also on the worker itself, so that all ranks decide alike."""
    layers = len(entry.members)
    entry.inner, entry.levels, failures = counters.split([entry.size, layers, layers])
    repeats = tensor_on(entry.device, entry.counts)
    failures = failures.repeat_interleave(repeats, output_size=entry.size)
    failure_counters.receive_failures(entry.group, entry.blocks, failures)
