"""Preconditioned gradients from the workers of each layer to the other ranks, each group while the next is solved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from natgrad.exchange.routes import Left
from natgrad.exchange.vectors import Size, Swap, nbytes
from natgrad.gradients.stacked import Entry, Gradients, Share
from natgrad.layers import Slot
from natgrad.linalg import tensor_on
from natgrad.placement import Plan, Runtime, cut, groups
from natgrad.stacks.blocks import Member
from natgrad.stacks.shards import Holders, is_sharded, pairs
from natgrad.trouble.guard import Watch


@dataclass
class _Mail:
    """One message: the preconditioned gradients of some stacks, from all workers of a row.

    Attributes:
        device: Where they are.
        entries: The stacks.
        rider: What travels first.
        pieces: What travels next, of gradients that no worker takes.
        swap: The message.
        told: The counters of those stacks that are this rank's, in order.
    """

    device: torch.device
    entries: Sequence[Entry]
    rider: list[Tensor]
    pieces: list[Tensor]
    swap: Swap
    told: list[Tensor] = field(default_factory=list)


def deliver(
    gradients: Gradients,
    solve: Callable[[Entry], None],
    plan: Plan[str],
    runtime: Runtime,
    watch: Watch,
    left: Left | None = None,
    rider: Sequence[float] = (),
) -> Tensor | None:
    """Precondition the gradients of this rank's layers, and give every rank those of all, or the rows that it holds.

    Each worker sends to the others of its row, bit for bit as it has them: every block's V and ⟨V, W⟩, and of every
    layer what has served it and how long it has been in trouble, so that all ranks decide alike. Where messages
    and products are long enough by the plan's link, the stacks go in groups, each under way while the next is solved.

    Args:
        gradients: Of all layers on every rank.
        solve: Preconditions a stack.
        plan: Who works for what.
        runtime: The ranks.
        watch: Is told of the trouble of all layers.
        left: Reduced gradients that no worker takes, which travel with the first group; then every layer has one
            worker.
        rider: What this rank has to say beside, as many numbers as the others; in the first message.

    Returns:
        The riders of the row, summed up, the same on all its ranks; None: there were none.
    """
    left = Left() if left is None else left
    said, heard = list(rider), None
    devices: dict[torch.device, list[Entry]] = {device: [] for device in left.devices}
    for entry in gradients.entries:
        devices.setdefault(entry.stack.device, []).append(entry)
    holders, row = Holders(runtime), plan.row(runtime.rank)
    mails = []
    for device, entries in devices.items():
        rest = left
        for group in _groups(entries, plan):
            mails.append(_expect(device, group, row, runtime, holders, rest, said))
            rest, said = Left(), []
    for mail in mails:
        for entry in mail.entries:
            if entry.stack.role.works:
                solve(entry)
        _post(mail, row, runtime, holders, watch)
    for mail in mails:
        total = _open(mail, row, runtime, holders, watch, left)
        heard = total if heard is None else heard
    return heard


def _groups(entries: Sequence[Entry], plan: Plan[str]) -> list[list[Entry]]:
    """Cut stacks into groups, of the workers of each column in equal parts: the same on every rank."""
    homes = [entry.stack.role.server % plan.columns for entry in entries]
    works, sizes = [0.0] * plan.columns, [0] * plan.columns
    for entry, home in zip(entries, homes, strict=True):
        works[home] += sum(plan.layers[member.layer.key].solve for member in entry.members)
        sizes[home] += _nbytes(entry)
    link, others = plan.placement.link_of(plan.ranks, plan.columns), plan.columns - 1
    heaviest = max((max(others * own, sum(sizes) - own) for own in sizes), default=0)
    count = min(groups(max(works) / plan.placement.link.products, heaviest, link=link), max(1, len(entries)))
    result: list[list[Entry]] = [[] for _ in range(count)]
    for column in range(plan.columns):
        own = [entry for entry, home in zip(entries, homes, strict=True) if home == column]
        for entry, number in zip(own, cut([_nbytes(entry) for entry in own], count), strict=True):
            result[number].append(entry)
    return [group for group in result if group] or [[]]


def _nbytes(entry: Entry) -> int:
    stack = entry.stack
    return stack.size * stack.outputs * stack.inputs * stack.work_dtype.itemsize


def _expect(
    device: torch.device,
    entries: Sequence[Entry],
    row: Sequence[int],
    runtime: Runtime,
    holders: Holders,
    left: Left,
    said: Sequence[float],
) -> _Mail:
    """Expect what others precondition of a group."""
    me, pieces = runtime.rank, left.own(device)
    rider = [tensor_on(device, said, torch.float64)] if said else []
    spoken: list[Size] = [(len(said), torch.float64)] if said else []
    expected: dict[int, list[Size]] = {rank: spoken + left.expected(device, rank) for rank in row if rank != me}
    for entry in entries:
        if not entry.stack.role.works:
            expected[entry.stack.role.server] += _sizes(entry, holders, me)
    sizes = [expected.get(rank, []) for rank in row]
    return _Mail(device, entries, rider, pieces, Swap(runtime, sizes, device, runtime.subgroup(row)))


def _post(mail: _Mail, row: Sequence[int], runtime: Runtime, holders: Holders, watch: Watch) -> None:
    """Begin to send what this rank has preconditioned of a group."""
    me = runtime.rank
    outgoing: dict[int, list[Tensor]] = {rank: [*mail.rider, *mail.pieces] for rank in row if rank != me}
    mail.told = _send([entry for entry in mail.entries if entry.stack.role.works], outgoing, holders, me, watch)
    counters = nbytes([*mail.rider, *mail.told]) * len(outgoing)
    runtime.count({"gradients": sum(map(nbytes, outgoing.values())) - counters, "counters": counters})
    mail.swap.send([outgoing.get(rank, []) for rank in row])


def _open(
    mail: _Mail, row: Sequence[int], runtime: Runtime, holders: Holders, watch: Watch, left: Left
) -> Tensor | None:
    """Wait for a message and read it; return what its riders add up to, in the order of the ranks."""
    mine = [*mail.rider, *mail.pieces]
    first, given = len(mail.rider), len(mine)
    received = mail.swap.wait()
    before = [mine if rank == runtime.rank else own[:given] for rank, own in zip(row, received, strict=True)]
    if mail.pieces:
        left.give(mail.device, [own[first:] for own in before])
    arrived = {rank: iter(vectors[given:]) for rank, vectors in zip(row, received, strict=True)}
    told = iter(mail.told)
    for entry in mail.entries:
        if entry.stack.role.works:
            _hear(entry, next(told), watch)
        else:
            _receive(entry, arrived[entry.stack.role.server], holders, runtime.rank, watch)
    return torch.stack([own[0] for own in before]).sum(0) if first else None


def _send(
    entries: list[Entry], outgoing: dict[int, list[Tensor]], holders: Holders, me: int, watch: Watch
) -> list[Tensor]:
    """Put what this rank has made of its own layers into the messages to others, and return what it tells all alike."""
    told = []
    for entry in entries:
        told.append(_counters(entry, watch))
        if _shares(entry, holders, me):
            entry.clear_(~entry.inner.isfinite())  # who gets some rows cannot tell whose block they are
        for rank, message in outgoing.items():
            message += [*_values(entry, holders, rank), told[-1]]
    return told


def _sizes(entry: Entry, holders: Holders, me: int) -> list[Size]:
    """Return what the worker of a stack sends this rank."""
    stack, shares = entry.stack, _shares(entry, holders, me)
    whole = stack.size * stack.outputs * stack.inputs
    sizes = [_numel(slot, rows) for _, slot, rows in shares] if shares else [whole]
    told = stack.size + 2 * len(stack.members) + (0 if stack.decisions is None else stack.decisions.message_size)
    return [(size, stack.work_dtype) for size in (*sizes, told)]


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
    ready = entry.told()
    if isinstance(ready, bool):
        ready = like.new_full((len(stack.members),), float(ready))
    verdicts = [] if stack.decisions is None or not stack.decisions.is_sent else [stack.decisions.message(like)]
    return torch.cat([like, ready, watch.trouble(stack).to(like), *verdicts])


def _hear(entry: Entry, counters: Tensor, watch: Watch) -> None:
    """Read what a worker has told, also where it is this rank: what is decided by it is then alike on all of them."""
    stack, layers = entry.stack, len(entry.stack.members)
    told = stack.size + 2 * layers
    entry.inner, ready, trouble, verdicts = counters.split([stack.size, layers, layers, len(counters) - told])
    if stack.decisions is not None:
        stack.decisions.received = verdicts if len(verdicts) else None
    repeats = tensor_on(stack.device, entry.blocks)
    entry.ready = ready.repeat_interleave(repeats, output_size=stack.size)
    watch.heard(stack, trouble.repeat_interleave(repeats, output_size=stack.size))
