"""Gradients that natgrad reduces, each to the one worker of its layer: stage 3 of Osawa 2020.

With the preconditioned gradients that the workers send back, N_g elements go from every rank to the workers and from
these to every rank: 2 (P - 1) N_g in all, as in the all-reduce of plain data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from natgrad.exchange.early import SCALED, WRONG, Early, Message, rescaled
from natgrad.exchange.routes import Left, Route, routes
from natgrad.exchange.vectors import Size, nbytes, swap
from natgrad.linalg import tensor_on
from natgrad.numerics.precision import at_least_float32
from natgrad.placement import Runtime, flatten
from natgrad.stacks.blocks import Stack

# For each route the addends of all ranks.
_Addends = list[list[Tensor]]


def reduce_to_workers(
    model: nn.Module,
    stacks: Sequence[Stack],
    runtime: Runtime,
    samples: int,
    *,
    summed: bool,
    early: Early,
    unscale: Tensor | None = None,
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
        early: What has left in the backward pass.
        unscale: What a ``GradScaler`` has multiplied gradients by since then.

    Returns:
        What makes the result the gradient of the mean loss, 1 for a mean loss and 1 / (all samples) for a sum; and the
        sums that no worker takes.
    """
    scale: float | Tensor = 1.0
    left = Left()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    early.follow(trained, stacks)
    early.send_rest()
    messages = early.messages
    whole = [] if messages else routes(trained, stacks, runtime.ranks)
    for device in dict.fromkeys(parameter.device for parameter in trained):
        parameters = [parameter for parameter in trained if parameter.device == device]
        used = [parameter.grad is not None for parameter in parameters]
        if messages:
            own = [message for message in messages if message.route.kind[0] == device]
            counts, users, addends = _gather(device, own, runtime, samples, used, unscale)
            ways = [message.route for message in own]
        else:
            ways = [route for route in whole if route.kind[0] == device]
            counts, users, addends = _send(device, ways, runtime, samples, used)
        if not all(used):
            # Only a rank that lacks a gradient asks whether another has it: that costs a synchronisation.
            for parameter, user in zip(parameters, users.amax(0).tolist(), strict=True):
                if parameter.grad is None and user:
                    parameter.grad = torch.zeros_like(parameter)
        total = counts.sum()
        # Where no rank has seen any samples (derivatives with a graph), all weigh alike.
        weights = torch.ones_like(counts) if summed else torch.where(total > 0, counts, 1)
        divisor = 1 if summed else weights.sum()
        left.add(
            device,
            [
                (route, route.write(runtime.rank, _average(own, weights, divisor)))
                for route, own in zip(ways, addends, strict=True)
            ],
        )
        if summed:
            wide = torch.float64 if any(route.kind[1] == torch.float64 for route in ways) else torch.float32
            scale = 1.0 / total.clamp(min=1).to(wide)
    early.settle()
    return scale, left


def _send(
    device: torch.device, ways: Sequence[Route], runtime: Runtime, samples: int, used: list[bool]
) -> tuple[Tensor, Tensor, _Addends]:
    """Send all addends to who sums them, in one message.

    Returns:
        The samples of every rank ``[P]``, which parameters each has used ``[P, n]``, and the addends of all.
    """
    me, others = runtime.rank, runtime.ranks - 1
    flags = tensor_on(device, used, torch.uint8)
    counters = [tensor_on(device, [samples], torch.int64), flags]
    addends = [route.addends() for route in ways]
    outgoing = [
        [] if rank == me else [*counters, *(tensor for own in addends for tensor in own[rank])]
        for rank in range(runtime.ranks)
    ]
    expected: list[Size] = [(1, torch.int64), (len(flags), torch.uint8)]
    expected += [(route.sizes[me], route.kind[1]) for route in ways]
    counted = nbytes(counters) * others
    runtime.count({"gradients": sum(map(nbytes, outgoing)) - counted, "counters": counted})
    arrived = swap(runtime, outgoing, [[] if rank == me else expected for rank in range(runtime.ranks)], device)
    arrived[me] = [*counters, *(_end_to_end(own[me], route) for route, own in zip(ways, addends, strict=True))]
    counts, users = torch.cat([vectors[0] for vectors in arrived]), torch.stack([vectors[1] for vectors in arrived])
    return counts, users, [[vectors[index] for vectors in arrived] for index in range(2, 2 + len(ways))]


def _gather(
    device: torch.device,
    messages: Sequence[Message],
    runtime: Runtime,
    samples: int,
    used: list[bool],
    unscale: Tensor | None,
) -> tuple[Tensor, Tensor, _Addends]:
    """Wait for what has left, tell each other what of it was not right, and send that again.

    Returns:
        What `_send` returns.
    """
    me, others = runtime.rank, runtime.ranks - 1
    addends = [message.route.addends() for message in messages]
    factor = torch.ones((), device=device) if unscale is None else unscale.to(device)
    counters = [
        tensor_on(device, [samples], torch.int64),
        factor.double().reshape(1),
        tensor_on(device, used, torch.uint8),
        torch.stack([message.compare(own, unscale) for message, own in zip(messages, addends, strict=True)]),
    ]
    runtime.count({"counters": nbytes(counters) * others})
    expected: list[Size] = [(tensor.numel(), tensor.dtype) for tensor in counters]
    arrived = swap(
        runtime,
        [[] if rank == me else counters for rank in range(runtime.ranks)],
        [[] if rank == me else expected for rank in range(runtime.ranks)],
        device,
    )
    arrived[me] = counters
    counts, factors, users, said = (torch.stack(list(own)) for own in zip(*arrived, strict=True))
    vectors = [message.wait() for message in messages]
    for own, all_addends, message in zip(vectors, addends, messages, strict=True):
        own[me] = _end_to_end(all_addends[me], message.route)
    # The one wait for the device: whether anything is sent once more is for the host to know, on all ranks.
    states: list[list[int]] = said.tolist()
    for message, state in zip(messages, states[me], strict=True):
        message.wrong = state == WRONG
    corrected = _send_again(device, messages, addends, runtime, states)
    for index, own in enumerate(vectors):
        for rank in range(runtime.ranks):
            if rank == me:
                continue
            if states[rank][index] == WRONG:
                own[rank] = next(corrected[rank])
            elif states[rank][index] == SCALED:
                own[rank] = rescaled(own[rank], factors[rank])
    return counts[:, 0], users, vectors


def _send_again(
    device: torch.device,
    messages: Sequence[Message],
    addends: Sequence[list[list[Tensor]]],
    runtime: Runtime,
    states: Sequence[Sequence[int]],
) -> list[Iterator[Tensor]]:
    """Send what was wrong once more, each rank its own; return for each rank what has come from it, in order."""
    me, ranks = runtime.rank, range(runtime.ranks)
    if not any(WRONG in own for own in states):
        return [iter(()) for _ in ranks]
    outgoing: list[list[Tensor]] = [
        [tensor for own, state in zip(addends, states[me], strict=True) if state == WRONG for tensor in own[rank]]
        for rank in ranks
    ]
    expected: list[list[Size]] = [
        [
            (message.route.sizes[me], message.route.kind[1])
            for message, state in zip(messages, states[rank], strict=True)
            if state == WRONG
        ]
        for rank in ranks
    ]
    outgoing[me], expected[me] = [], []
    runtime.count({"gradients": sum(map(nbytes, outgoing))})
    return [iter(vectors) for vectors in swap(runtime, outgoing, expected, device)]


def _end_to_end(addends: list[Tensor], route: Route) -> Tensor:
    """Return the addends of a route to the sums of one rank as one vector."""
    device, dtype = route.kind
    return flatten(addends) if addends else torch.empty(0, dtype=dtype, device=device)


def _average(addends: Sequence[Tensor], weights: Tensor, divisor: Tensor | int) -> Tensor:
    """Return the sum of the addends ``[n]`` of all ranks, weighted by whole numbers ``[P]`` over a divisor."""
    dtype, wide = addends[0].dtype, at_least_float32(addends[0].dtype)
    result = addends[0].new_zeros(len(addends[0]), dtype=wide)
    for addend, weight in zip(addends, (weights.to(wide) / divisor).unbind(), strict=True):
        result.addcmul_(addend.to(wide), weight)
    return result.to(dtype)
