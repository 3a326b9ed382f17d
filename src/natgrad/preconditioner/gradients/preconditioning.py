"""Precondition the gradients of a step on their workers, and find those that are unusable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from natgrad.distributed import Communicator
from natgrad.distributed.buckets import LEAST_MESSAGES, narrower
from natgrad.distributed.fsdp import held_rows, post_rows
from natgrad.errors import NatgradError
from natgrad.layers import Slot
from natgrad.linalg.device import known_between, known_finite, on_host
from natgrad.preconditioner.gradients.stacked import GroupGradients, has_shards
from natgrad.preconditioner.guard.guard import FailureCounters
from natgrad.profiling import profiled
from natgrad.state.averages import allocate_memory, live_averages
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.epochs import add_gradients
from natgrad.state.failures import Level
from natgrad.state.results import read_results
from natgrad.state.tensors import along

# Bytes of sharded gradients that are gathered at once: enough to hide the latency of a message.
_BUCKET = 2**26
# The bytes of gradients that are preconditioned together, which bounds the memory of intermediate results.
_PIECE = 2**26
# From this number of elements on, inner products on a CPU are computed one by one.
_LONG = 65536


def precondition(
    groups: Sequence[BlockGroup], damping: float, runtime: Communicator, *, shared: bool, skips: Tensor | None
) -> Iterator[GroupGradients]:
    """Yield the gradients of layers, preconditioned where this rank is a worker; if `shared`, of all layers.

    If the optimizer `skips` this step (bool; None: it does not), none is usable, and no state changes.
    Sharded gradients are collected for some groups at a time. Peak memory: the preconditioned gradients of all groups,
    the collected ones of twice `_BUCKET` bytes or of the two largest groups, and the raw ones of one group.
    """
    entries = _collect(groups, shared=shared)
    are_whole = not any(has_shards(entry.group) for entry in entries)
    for bucket, received in [(entries, {})] if are_whole else _received(_buckets(entries), runtime):
        for entry in bucket:
            if entry.group.role.is_gradient_worker:
                with profiled("precondition"):
                    entry.gather(received)
                    add_gradients(entry.group, entry.W, entry.blocks)
                    entry.V = _solve(entry.group, entry.members, entry.W, damping, skips)
                    _check(entry, skips)
            yield entry


def clear_unusable(entries: Sequence[GroupGradients], failures: FailureCounters) -> None:
    """Make gradients that are not finite or unusable zero, and count them and the layers that fell back."""
    for entry in entries:
        entry.failed = None if entry.is_fine or known_between(entry.inner) else ~entry.inner.isfinite()
        if entry.failed is not None:
            entry.clear_(entry.failed)
        failures.count_skipped_gradients(entry.group, entry.blocks, entry.failed)
        failures.record_levels(entry.group, entry.members, entry.levels)


def dots(X: Tensor, Y: Tensor) -> Tensor:
    """Return the inner product of each block ``[N]`` of two tensors ``[N, o, i]``."""
    X, Y = X.flatten(1), Y.flatten(1)
    if not on_host(X):
        return torch.bmm(X[:, None, :], Y[:, :, None])[:, 0, 0]
    if X.shape[1] < _LONG or not X.shape[0]:
        products: Tensor = torch.linalg.vecdot(X, Y)
        return products
    return torch.stack(list(map(torch.dot, X, Y)))  # MKL's batched product takes 5 to 8 times as long


def _solve(
    group: BlockGroup, members: Sequence[LayerBlocks], W: Tensor, damping: float, skips: Tensor | None
) -> Tensor:
    """Return the preconditioned gradients of some layers, and update the curvature's state by finite gradients.

    W ``[n, o, i]`` is returned unchanged for layers without complete results, unless the curvature does without.
    """
    ready = group.are_ready(members)
    if len(set(ready)) > 1:
        parts = W.split([member.stop - member.start for member in members])
        pairs = zip(members, parts, strict=True)
        return torch.cat([_solve(group, [member], part, damping, skips) for member, part in pairs])
    has_results = any(ready)
    if not has_results and group.curvature.needs_results:
        return W
    blocks, count = group.blocks_of(members), W.shape[0]
    if W.nbytes <= _PIECE:
        return _solve_piece(group, blocks, W, damping, skips, has_results=has_results)
    V, step = torch.empty_like(W), max(1, _PIECE * count // W.nbytes)
    for start in range(0, count, step):
        piece = slice(start, min(start + step, count))
        if isinstance(blocks, slice):
            some = range(group.size)[blocks][piece]
            index: slice | Tensor = slice(some.start, some.stop)
        else:
            index = blocks[piece]
        V[piece] = _solve_piece(group, index, W[piece], damping, skips, has_results=has_results)
    return V


def _solve_piece(
    group: BlockGroup, blocks: slice | Tensor, W: Tensor, damping: float, skips: Tensor | None, *, has_results: bool
) -> Tensor:
    """Do what `_solve` does for some `blocks` of a group, whose layers all have complete results or have none."""
    state: dict[str, Tensor] = {}
    if group.memory_specs:
        memory = allocate_memory(group)
        state = {spec.name: memory.read(spec.name, blocks).to(W.dtype) for spec in group.memory_specs}
        all_finite = skips is None and known_finite(W)
        updated = group.curvature.update_state(state, W)
        if not isinstance(updated, Mapping):
            raise _wrong_result(f"update_state() of {group.curvature!r}", updated, "tensors by name")
        for name, new in updated.items():
            if name not in state or not _has_shape(new, state[name].shape):
                wanted = tuple(state[name].shape) if name in state else f"nothing: it declares {', '.join(state)}"
                raise _wrong_result(f"update_state() of {group.curvature!r}, as {name!r},", new, wanted)
            values = new
            if not all_finite:
                sums = _unless(skips, W.flatten(1).sum(1))  # finite only if all terms are
                values = torch.where(along(sums.isfinite(), new.ndim - 1), new, state[name])
            state[name] = values
            memory.write(name, blocks, values)
    names = group.state.results if has_results else ()
    computed, averages = read_results(group, names, blocks, W.dtype), live_averages(group, blocks)
    solved = group.curvature.precondition(computed, averages, state, W, damping * group.factor)
    if not _has_shape(solved, W.shape):
        raise _wrong_result(f"precondition() of {group.curvature!r}", solved, tuple(W.shape))
    if solved.dtype != W.dtype:
        raise _wrong_result(f"precondition() of {group.curvature!r}", solved.dtype, W.dtype)
    return solved


def _has_shape(returned: object, wanted: torch.Size) -> bool:
    return isinstance(returned, Tensor) and returned.shape == wanted


def _wrong_result(call: str, returned: object, wanted: object) -> NatgradError:
    """Return the error of a curvature that has returned something else than what is wanted, such as a shape."""
    found: object = tuple(returned.shape) if isinstance(returned, Tensor) else returned
    found = found if isinstance(found, tuple | torch.dtype) else type(found).__name__
    return NatgradError(f"{call} has returned {found} in place of {wanted}", "your-own-code")


# --- Sharded gradients ----------------------------------------------------------------------------------------------


def _collect(groups: Sequence[BlockGroup], *, shared: bool) -> list[GroupGradients]:
    """Return the layers with a ``.grad``, or all layers."""
    found = []
    for group in groups:
        members = [
            member
            for member in group.members
            if shared or any(slot.parameter.grad is not None for slot in member.layer.slots)
        ]
        if members:
            found.append(GroupGradients(group, members))
    return found


def _buckets(entries: Sequence[GroupGradients]) -> Iterator[list[GroupGradients]]:
    """Yield groups whose sharded gradients are collected together; the same on all ranks.

    Each has groups of all workers, which then receive at once.
    """
    by_workers: dict[tuple[int, ...], list[GroupGradients]] = {}
    for entry in entries:
        by_workers.setdefault(entry.group.role.assignment.workers, []).append(entry)
    limit = min(_BUCKET, sum(map(_bytes, entries)) // LEAST_MESSAGES) // len(by_workers)
    for parts in zip_longest(*(_pieces(own, limit) for own in by_workers.values()), fillvalue=()):
        yield [entry for part in parts for entry in part]


def _pieces(entries: Iterable[GroupGradients], limit: int) -> Iterator[list[GroupGradients]]:
    """Yield successive groups of at most `limit` bytes together, or one."""
    piece: list[GroupGradients] = []
    for entry in entries:
        if piece and sum(map(_bytes, piece)) + _bytes(entry) > limit:
            yield piece
            piece = []
        piece.append(entry)
    if piece:
        yield piece


def _bytes(entry: GroupGradients) -> int:
    return entry.group.size * entry.group.outputs * entry.group.inputs * entry.dtype.itemsize


def _received(
    buckets: Iterable[list[GroupGradients]], runtime: Communicator
) -> Iterator[tuple[list[GroupGradients], dict[int, Tensor]]]:
    """Yield groups with the rows of `_post_rows`, while those of the next groups are being sent."""
    waiting: tuple[list[GroupGradients], Callable[[], dict[int, Tensor]]] | None = None
    for bucket in buckets:
        following = bucket, _post_rows(bucket, runtime)
        if waiting is not None:
            yield waiting[0], waiting[1]()
        waiting = following
    if waiting is not None:
        yield waiting[0], waiting[1]()


def _post_rows(bucket: Sequence[GroupGradients], runtime: Communicator) -> Callable[[], dict[int, Tensor]]:
    """Start to send each worker all rows of its sharded gradients; the result returns them by the parameter's ``id``.

    The rows come from the S ranks of the worker's copy of the model (under HSDP one replica, otherwise all ranks).
    Each other rank of these sends 1 / S of a layer's gradient, in bfloat16 where the worker computes in that.
    """
    wanted = [
        (slot, narrower(entry.sent, slot.parameter.dtype), entry.group.role.assignment.workers)
        for entry in bucket
        for member in entry.members
        for slot in member.layer.slots
    ]
    return post_rows(wanted, _gradient_rows, runtime, "gradients")


def _gradient_rows(slot: Slot, rows: range) -> Tensor:
    """Return rows of the gradient in the parameter's dtype, zeros if there is no gradient."""
    values, parameter = held_rows(slot, rows), slot.parameter
    if values is None:
        return torch.zeros(len(rows), *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    return values.to(parameter.dtype)


# --- Unusable results -----------------------------------------------------------------------------------------------


def _unless(skips: Tensor | None, numbers: Tensor) -> Tensor:
    """Return the numbers ``[n]``, or nan in a step that the optimizer `skips`."""
    return numbers if skips is None else numbers.masked_fill(skips.to(numbers.device), math.nan)


def _check(entry: GroupGradients, skips: Tensor | None) -> None:
    """Set the levels of a group's layers, and ⟨V, W⟩ of each block: nan where V is unusable. W is dropped."""
    group, inner = entry.group, dots(entry.V, entry.W)
    lowest = 0 if group.curvature.positive_definite else -math.inf
    unusable, usable = None, known_between(inner, lowest)
    if not usable:
        unusable = ~((inner > lowest) & (inner < math.inf))
        square = dots(entry.W, entry.W)
        # ⟨V, W⟩ is zero, and no failure, if the gradient is zero or tiny.
        is_small = square < torch.finfo(square.dtype).tiny ** 0.5
        unusable &= (square < math.inf) & ~((inner == 0) & is_small)
        inner = inner.masked_fill(unusable, math.nan)
    group.state.failures.record_unusable(entry.blocks, unusable)
    del entry.W
    entry.is_fine = usable and skips is None
    entry.inner, entry.levels = _unless(skips, inner), _levels(group, entry.members)


def _levels(group: BlockGroup, members: list[LayerBlocks]) -> list[Level]:
    ready, failures = group.are_ready(members), group.state.failures
    if all(ready) and not failures.is_stale(slice(None)):
        return [Level.FRESH] * len(members)
    usual = (Level.STALE if failures.is_stale(member.blocks) else Level.FRESH for member in members)
    return [level if each else Level.PLAIN for level, each in zip(usual, ready, strict=True)]
