"""Preconditioned gradients from the workers of each layer to the other ranks, in one message a step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from natgrad.blocks import Member
from natgrad.exchange.reduce import Left
from natgrad.exchange.vectors import Size, nbytes, swap
from natgrad.gradients import Entry, Gradients, Share
from natgrad.guard import Watch
from natgrad.layers import Slot
from natgrad.linalg import tensor_on
from natgrad.placement import Plan, Runtime
from natgrad.shards import Holders, is_sharded, pairs


def deliver(gradients: Gradients, plan: Plan[str], runtime: Runtime, watch: Watch, left: Left | None = None) -> None:
    """Give every rank the preconditioned gradients of all layers, of sharded parameters the rows that it holds.

    Each worker sends to the others of its row, bit for bit as it has them: every block's V and ⟨V, W⟩, and of every
    layer whether it has curvature and how long it has been in trouble, so that all ranks decide alike.

    Args:
        gradients: Of all layers on every rank; those that this rank works for are solved.
        plan: Who works for what.
        runtime: The ranks.
        watch: Is told of the trouble of all layers.
        left: Reduced gradients that no worker takes, which travel along; then every layer has one worker.
    """
    left = Left() if left is None else left
    devices: dict[torch.device, list[Entry]] = {device: [] for device in left.devices}
    for entry in gradients.entries:
        devices.setdefault(entry.stack.device, []).append(entry)
    holders, me, row = Holders(runtime), runtime.rank, plan.row(runtime.rank)
    for device, entries in devices.items():
        pieces = left.own(device)
        outgoing: dict[int, list[Tensor]] = {rank: list(pieces) for rank in row if rank != me}
        expected: dict[int, list[Size]] = {rank: left.expected(device, rank) for rank in row if rank != me}
        own = [entry for entry in entries if entry.stack.role.works]
        others = [entry for entry in entries if not entry.stack.role.works]
        told = _send(own, outgoing, holders, me, watch)
        for entry in others:
            expected[entry.stack.role.server] += _sizes(entry, holders, me)
        counters = nbytes(told) * len(outgoing)
        runtime.count({"gradients": sum(map(nbytes, outgoing.values())) - counters, "counters": counters})
        received = swap(runtime, [outgoing.get(r, []) for r in row], [expected.get(r, []) for r in row], device, row)
        given = len(pieces)
        left.give(device, [pieces if r == me else vectors[:given] for r, vectors in zip(row, received, strict=True)])
        arrived = {rank: iter(vectors[given:]) for rank, vectors in zip(row, received, strict=True)}
        for entry in others:
            _receive(entry, arrived[entry.stack.role.server], holders, me, watch)
        for entry, counted in zip(own, told, strict=True):
            _hear(entry, counted, watch)


def _send(
    entries: list[Entry], outgoing: dict[int, list[Tensor]], holders: Holders, me: int, watch: Watch
) -> list[Tensor]:
    """Put what this rank has made of its own layers into the messages to others, and return what it tells all alike."""
    told = []
    for entry in entries:
        told.append(_counters(entry, watch))
        if _shares(entry, holders, me):
            entry.clear_(entry.inner.isfinite())  # who gets some rows cannot tell whose block they are
        for rank, message in outgoing.items():
            message += [*_values(entry, holders, rank), told[-1]]
    return told


def _sizes(entry: Entry, holders: Holders, me: int) -> list[Size]:
    """Return what the worker of a stack sends this rank."""
    stack, shares = entry.stack, _shares(entry, holders, me)
    whole = stack.size * stack.outputs * stack.inputs
    sizes = [_numel(slot, rows) for _, slot, rows in shares] if shares else [whole]
    return [(size, stack.work_dtype) for size in (*sizes, stack.size + 2 * len(stack.members))]


def _receive(entry: Entry, message: Iterator[Tensor], holders: Holders, me: int, watch: Watch) -> None:
    """Read what the worker of a stack has sent."""
    shares = _shares(entry, holders, me)
    if shares:
        entry.shares = [Share(slot, rows, member.start, next(message)) for member, slot, rows in shares]
    else:
        entry.V = next(message).view(entry.stack.size, entry.stack.outputs, entry.stack.inputs)
    _hear(entry, next(message), watch)


def _shares(entry: Entry, holders: Holders, rank: int) -> list[tuple[Member, Slot, range]]:
    """Return which rows of the parameters of a stack `rank` holds; none: all of them, for no parameter is sharded."""
    slots = [(member, slot) for member in entry.members for slot in member.layer.slots]
    if not any(is_sharded(slot.parameter) for _, slot in slots):
        return []
    return [(member, slot, holders.rows(slot, rank)) for member, slot in slots]


def _values(entry: Entry, holders: Holders, rank: int) -> list[Tensor]:
    """Return what `rank` is to get of V."""
    shares = _shares(entry, holders, rank)
    values = [entry.V.new_empty(_numel(slot, rows)) for _, slot, rows in shares]
    targets, sources = [], []
    for (member, slot, rows), value in zip(shares, values, strict=True):
        blocks = entry.V[member.blocks, :, slot.columns]
        for part, place in pairs(member.layer, slot, slot.parameter.shape, [(rows.start, value)], blocks):
            targets.append(part)
            sources.append(place)
    if targets:
        torch._foreach_copy_(targets, sources)
    return values if shares else [entry.V]


def _numel(slot: Slot, rows: range) -> int:
    return len(rows) * math.prod(slot.parameter.shape[1:])


def _counters(entry: Entry, watch: Watch) -> Tensor:
    stack, like = entry.stack, entry.inner
    ready = tensor_on(stack.device, [float(flag) for flag in stack.ready], like.dtype)
    return torch.cat([like, ready, watch.trouble(stack).to(like)])


def _hear(entry: Entry, counters: Tensor, watch: Watch) -> None:
    """Read what a worker has told, also where it is this rank: what is decided by it is then alike on all of them."""
    stack, layers = entry.stack, len(entry.stack.members)
    entry.inner, ready, trouble = counters.split([stack.size, layers, layers])
    repeats = tensor_on(stack.device, entry.blocks)
    entry.ready = ready.repeat_interleave(repeats, output_size=stack.size)
    watch.heard(stack, trouble.repeat_interleave(repeats, output_size=stack.size))
