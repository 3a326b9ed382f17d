"""Gather gradients from ``.grad`` into blocks, precondition them and write them back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter

import torch
from torch import Tensor

from natgrad.distributed import Communicator
from natgrad.distributed.fsdp import Piece, collect_rows, held_rows, match, pairs
from natgrad.layers import Slot
from natgrad.linalg import tensor_on
from natgrad.linalg.device import known_all
from natgrad.linalg.joined import together
from natgrad.preconditioner.epochs import add_gradients
from natgrad.preconditioner.guard.fallback import Case, FallbackPolicy, Outcome
from natgrad.preconditioner.guard.guard import FailureCounters, Trouble
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.matrices import places

# Bytes of sharded gradients that are gathered at once: enough to hide the latency of a message.
_BUCKET = 2**26


@dataclass
class Share:
    """Rows of a preconditioned gradient that this rank holds, of a layer that it is not a worker of.

    Attributes:
        slot: The parameter.
        rows: The rows.
        block: The first block of its layer.
        values: Their values, flat.
    """

    slot: Slot
    rows: range
    block: int
    values: Tensor


@dataclass
class Entry:
    """The gradients of some layers of a group.

    Attributes:
        group: The group.
        members: The layers.
        fallback: Replaces what is unsound.
        ready: Whether they have curvature: all (True), none (False), or the `Level` of each block's layer ``[N]``.
        plain: Whether any of them may have no curvature yet.
        V: Preconditioned gradients ``[N, o, i]`` after `solved`; the raw ones W where there is no curvature yet.
        shares: Instead of V, if the parameters are sharded and this rank is not a worker: the rows that it holds.
        inner: ⟨V, W⟩ of each block ``[N]``; not finite where the gradient is not.
    """

    group: BlockGroup
    members: list[LayerBlocks]
    fallback: FallbackPolicy
    ready: bool | Tensor = False
    plain: bool = True
    V: Tensor = field(init=False)
    shares: list[Share] | None = None
    inner: Tensor = field(init=False)

    def settle(self, outcome: Outcome) -> None:
        """Take the gradients after the fallbacks."""
        self.V, self.inner, self.ready, self.plain = outcome.V, outcome.inner, outcome.levels, outcome.plain

    def solved(self, damping: float, gathered: Mapping[int, list[Piece]]) -> Case:
        """Return the raw and the preconditioned gradients. A missing gradient of a weight or bias counts as zero.

        Args:
            damping: γ.
            gathered: The rows of sharded gradients, by the parameter's ``id``.
        """
        group, started = self.group, perf_counter()
        W = torch.empty(sum(self.blocks), group.outputs, group.inputs, dtype=group.work_dtype, device=group.device)
        targets, sources = [], []
        for layer, slot, view in places(self.members, W):
            gradient = slot.parameter.grad
            if gradient is None:
                view.zero_()
                continue
            pieces = gathered.get(id(slot.parameter))
            views = match(layer, slot, gradient, view) if pieces is None else pairs(layer, slot, pieces, view)
            for rows, place in views:
                targets.append(place)
                sources.append(rows)
        if targets:  # there may be none: other ranks expect a result even for a layer that no rank has used
            torch._foreach_copy_(targets, sources)
        add_gradients(group, W, self.places())
        V = self._solved(W, damping)
        group.charge(self.members, perf_counter() - started)
        return Case(group, self.members, self.places(), W, V)

    def _solved(self, W: Tensor, damping: float) -> Tensor:
        group, places = self.group, self.places()
        flags = [group.ready[group.members.index(member)] for member in self.members]
        if not any(flags):
            return W
        if all(flags):
            return group.solve(self.where, W, damping)
        # Layers without curvature keep their gradients.
        every = [flag for flag, count in zip(flags, self.blocks, strict=True) for _ in range(count)]
        own = tensor_on(group.device, [index for index, flag in enumerate(every) if flag])
        blocks = own if places is None else tensor_on(group.device, places)[own]
        V = W.clone()
        V[own] = group.solve(blocks, W[own], damping)
        return V

    def told(self) -> bool | Tensor:
        """Return `ready` with one number for each layer instead of each block."""
        if isinstance(self.ready, bool) or len(self.ready) == len(self.members):
            return self.ready
        return self.ready[tensor_on(self.ready.device, [0, *accumulate(self.blocks[:-1])])]

    @property
    def blocks(self) -> list[int]:
        """The number of blocks of each layer."""
        return [member.stop - member.start for member in self.members]

    def places(self) -> list[int] | None:
        """Return the indices of these blocks in the group. None: all blocks."""
        if len(self.members) == len(self.group.members):
            return None
        return [block for member in self.members for block in range(member.start, member.stop)]

    @property
    def where(self) -> slice | Tensor:
        """`places` as an index."""
        places = self.places()
        return slice(None) if places is None else tensor_on(self.group.device, places)

    @property
    def is_clipped(self) -> bool:
        """Whether the KL clip applies: there is curvature, which keeps the gradient's length."""
        return self.ready is not False and not self.group.curvature.is_normalized

    def scale_(self, scale: float | Tensor) -> list[Tensor]:
        """Multiply V by `scale` where there is curvature. Return tensors that the caller must multiply as a whole."""
        if not self.is_clipped:
            return []
        if self.shares is not None:
            for share in self.shares:
                assert isinstance(self.ready, Tensor)  # sent by the worker together with the shares
                share.values.mul_(torch.where(self.ready[share.block] > 0, scale, 1.0))
            return []
        if self.plain and isinstance(self.ready, Tensor):
            self.V.mul_(torch.where(self.ready > 0, scale, 1.0)[:, None, None])
            return []
        return [self.V]

    def clear_(self, bad: Tensor) -> None:
        """Make V zero where it is `bad` ``[N]``."""
        if not known_all(~bad):
            self.V.masked_fill_(bad[:, None, None], 0)  # a product would keep NaN


class Gradients:
    """The gradients of one step.

    Attributes:
        entries: One for each group with gradients to precondition.
    """

    def __init__(self, entries: list[Entry]) -> None:
        """Wrap `entries`."""
        self.entries = entries

    @classmethod
    def take(cls, groups: list[BlockGroup], fallback: FallbackPolicy, *, exchanged: bool) -> Gradients:
        """Collect the layers with a ``.grad``; all layers if results are exchanged, so that ranks agree."""
        entries = []
        for group in groups:
            members = [member for member in group.members if exchanged or _has_gradient(member)]
            if members:
                entries.append(Entry(group, members, fallback))
        return cls(entries)

    def solve(self, damping: float, runtime: Communicator) -> None:
        """Precondition the groups that this rank is a worker of. Layers without curvature keep their gradients.

        Sharded gradients are collected for some groups at a time. Peak memory: the preconditioned gradients of all
        these groups, the collected ones of `_BUCKET` bytes or of the largest group, and the raw ones of groups that
        are processed together.
        """
        for bucket in self._buckets():
            gathered = _collect(bucket, runtime)
            for some in alike([entry for entry in bucket if entry.group.role.is_gradient_worker]):
                cases = [entry.solved(damping, gathered) for entry in some]
                outcomes = some[0].fallback.replace_unsound(cases, damping)
                for entry, outcome in zip(some, outcomes, strict=True):
                    entry.settle(outcome)
            del gathered  # before the next ones are collected

    def _buckets(self) -> Iterator[list[Entry]]:
        """Yield groups whose sharded gradients are collected together; the same on all ranks."""
        bucket: list[Entry] = []
        size = 0
        for entry in self.entries:
            group = entry.group
            more = group.size * group.outputs * group.inputs * group.work_dtype.itemsize
            if size and size + more > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(entry)
            size += more
        if bucket:
            yield bucket

    def clear_(self, bad: Sequence[Tensor]) -> None:
        """Make V of each entry zero where it is `bad` ``[N]``. Workers clear what other ranks hold."""
        for entry, own in zip(self.entries, bad, strict=True):
            if entry.shares is None:
                entry.clear_(own)

    def scale_(self, scale: float | Tensor) -> None:
        """Multiply V of all entries by `scale`, where there is curvature."""
        if isinstance(scale, float) and scale == 1.0:
            return
        for entries in together(self.entries, lambda entry: (entry.inner.device, None)):
            own = scale.to(entries[0].inner.device) if isinstance(scale, Tensor) else scale
            whole = [V for entry in entries for V in entry.scale_(own)]
            if whole:
                torch._foreach_mul_(whole, own)

    def tell(self, watch: FailureCounters, bad: Sequence[Tensor]) -> None:
        """Count the blocks of each entry that were not finite, `bad` ``[N]``, and the levels of its layers."""
        watch.saw_gradients(
            [Trouble(entry.group, entry.where, own) for entry, own in zip(self.entries, bad, strict=True)]
        )
        watch.saw_levels([(entry.group, entry.members, entry.told()) for entry in self.entries])

    def give(self) -> None:
        """Write the preconditioned gradients into ``.grad``, in place."""
        targets, sources = [], []
        for entry in self.entries:
            for share in entry.shares or ():
                rows = held_rows(share.slot, share.rows)
                if rows is not None and len(rows):
                    targets.append(rows)
                    sources.append(share.values.view(rows.shape))
            for layer, slot, view in places(entry.members, entry.V) if entry.shares is None else ():
                gradient = slot.parameter.grad
                if gradient is None:
                    continue
                for rows, place in match(layer, slot, gradient, view):
                    targets.append(rows)
                    sources.append(place)
        if targets:
            torch._foreach_copy_(targets, sources)


def alike(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Yield entries that are processed together (`together`), whose raw gradients are in memory at once."""

    def nbytes(entry: Entry) -> int:
        group = entry.group
        return sum(entry.blocks) * group.outputs * group.inputs * group.work_dtype.itemsize

    return together(entries, lambda entry: (entry.group.device, entry.group.work_dtype), nbytes)


def _collect(entries: Sequence[Entry], runtime: Communicator) -> dict[int, list[Piece]]:
    """Send each worker all rows of the sharded gradients that it preconditions.

    The rows come from the S ranks of the worker's copy of the model (under HSDP one replica, otherwise all ranks). Each
    other rank of these sends 1 / S of a layer's gradient.

    Returns:
        The rows by the parameter's ``id``, without plain parameters.
    """
    wanted = [
        (slot, entry.group.role.seat.workers)
        for entry in entries
        for member in entry.members
        for slot in member.layer.slots
    ]
    return collect_rows(wanted, _gradient, runtime, "gradients")


def _gradient(slot: Slot, rows: range) -> Tensor:
    """Return rows of the gradient in the parameter's dtype, zeros if there is no gradient."""
    values, parameter = held_rows(slot, rows), slot.parameter
    if values is None:
        return torch.zeros(len(rows), *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    return values.to(parameter.dtype)


def _has_gradient(member: LayerBlocks) -> bool:
    return any(slot.parameter.grad is not None for slot in member.layer.slots)
