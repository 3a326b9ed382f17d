"""Preconditioned gradients from the workers of each layer to the other ranks, in one message a step."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.blocks import Stack
from natgrad.gradients import Entry, Gradients
from natgrad.guard import Watch
from natgrad.linalg import tensor_on
from natgrad.placement import Plan, Runtime


def deliver(gradients: Gradients, plan: Plan[str], runtime: Runtime, watch: Watch) -> None:
    """Give every rank the preconditioned gradients of all layers.

    Each worker sends to the others of its row, bit for bit as it has them: every block's V and ⟨V, W⟩, and of every
    layer whether it has curvature and how long it has been in trouble, so that all ranks decide alike.

    Args:
        gradients: Of all layers on every rank; those that this rank works for are solved.
        plan: Who works for what.
        runtime: The ranks.
        watch: Is told of the trouble of all layers.
    """
    row = plan.row(runtime.rank)
    groups: dict[tuple[torch.device, torch.dtype], list[Entry]] = {}
    for entry in gradients.entries:
        groups.setdefault((entry.stack.device, entry.stack.work_dtype), []).append(entry)
    for (device, dtype), entries in groups.items():
        served = {rank: [entry for entry in entries if entry.stack.role.server == rank] for rank in row}
        mine = served[runtime.rank]
        sizes = {rank: sum(_numel(entry.stack) for entry in own) * dtype.itemsize for rank, own in served.items()}
        sent = torch.cat([_pack(entry, watch) for entry in mine]).view(torch.uint8) if mine else None
        outgoing = [[] if rank == runtime.rank or sent is None else [sent] for rank in row]
        counters = sum(_counters(entry.stack) for entry in mine) * dtype.itemsize
        others = len(row) - 1
        runtime.count({"gradients": (sizes[runtime.rank] - counters) * others, "counters": counters * others})
        expected = [0 if rank == runtime.rank else sizes[rank] for rank in row]
        arrived = runtime.exchange(outgoing, expected, device, row)
        for rank, message in zip(row, arrived, strict=True):
            numbers = sent if rank == runtime.rank else message
            if numbers is None:
                continue
            own = served[rank]
            pieces = numbers.view(dtype).split([_numel(entry.stack) for entry in own])
            for entry, piece in zip(own, pieces, strict=True):
                _unpack(entry, piece, watch)


def _counters(stack: Stack) -> int:
    return stack.size + 2 * len(stack.members)


def _numel(stack: Stack) -> int:
    return stack.size * stack.outputs * stack.inputs + _counters(stack)


def _pack(entry: Entry, watch: Watch) -> Tensor:
    stack, like = entry.stack, entry.inner
    ready = tensor_on(stack.device, [float(flag) for flag in stack.ready], like.dtype)
    return torch.cat([entry.V.reshape(-1), entry.inner, ready, watch.trouble(stack).to(like)])


def _unpack(entry: Entry, numbers: Tensor, watch: Watch) -> None:
    """Read what a worker has sent, also where it is this rank: what is decided by it is then alike on all of them."""
    stack, shape = entry.stack, (entry.stack.size, entry.stack.outputs, entry.stack.inputs)
    layers = len(stack.members)
    V, inner, ready, trouble = numbers.split([shape[0] * shape[1] * shape[2], stack.size, layers, layers])
    repeats = tensor_on(stack.device, entry.blocks)
    entry.V, entry.inner = V.view(shape), inner
    entry.ready = ready.repeat_interleave(repeats, output_size=stack.size)
    watch.heard(stack, trouble.repeat_interleave(repeats, output_size=stack.size))
