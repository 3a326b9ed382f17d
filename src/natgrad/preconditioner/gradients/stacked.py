"""Gradients between the parameters' ``.grad`` and the stacks: gathered, preconditioned, given back."""

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

# How many bytes of sharded gradients are gathered at once: enough to hide the latency of a message.
_BUCKET = 2**26


@dataclass
class Share:
    """Rows of a preconditioned gradient that this rank holds, of a layer that others work for.

    Attributes:
        slot: The parameter.
        rows: Which of its rows.
        block: The first block of its layer.
        values: The rows end to end.
    """

    slot: Slot
    rows: range
    block: int
    values: Tensor


@dataclass
class Entry:
    """The gradients of some layers of a stack.

    Attributes:
        stack: The stack.
        members: The layers.
        fallback: Replaces what is unsound.
        ready: Whether they have curvature: all, none, or the level of each block's layer ``[N]``, above 0 where it has.
        plain: Whether any of them may have none.
        V: Preconditioned gradients ``[N, o, i]``, once solved; the raw ones W where there is no curvature yet.
        shares: In place of V, where the parameters are sharded and this rank does not work for the layers: what it
            holds of V.
        inner: ⟨V, W⟩ of each block ``[N]``; not finite where the gradient is not.
    """

    stack: BlockGroup
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
        """Return the raw gradients and what curvature makes of them; a missing one of two (weight, bias) is zero.

        Args:
            damping: γ.
            gathered: The rows of those gradients that are sharded, by the parameter's ``id``.
        """
        stack, started = self.stack, perf_counter()
        W = torch.empty(sum(self.blocks), stack.outputs, stack.inputs, dtype=stack.work_dtype, device=stack.device)
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
        if targets:  # other ranks expect a layer's result even where no rank has used it yet
            torch._foreach_copy_(targets, sources)
        add_gradients(stack, W, self.places())
        V = self._solved(W, damping)
        stack.charge(self.members, perf_counter() - started)
        return Case(stack, self.members, self.places(), W, V)

    def _solved(self, W: Tensor, damping: float) -> Tensor:
        stack, places = self.stack, self.places()
        flags = [stack.ready[stack.members.index(member)] for member in self.members]
        if not any(flags):
            return W
        if all(flags):
            return stack.solve(self.where, W, damping)
        # Some layers have none yet, or are left plain: their gradients pass through.
        every = [flag for flag, count in zip(flags, self.blocks, strict=True) for _ in range(count)]
        own = tensor_on(stack.device, [index for index, flag in enumerate(every) if flag])
        blocks = own if places is None else tensor_on(stack.device, places)[own]
        V = W.clone()
        V[own] = stack.solve(blocks, W[own], damping)
        return V

    def told(self) -> bool | Tensor:
        """Return `ready` with a number for each layer in place of its blocks."""
        if isinstance(self.ready, bool) or len(self.ready) == len(self.members):
            return self.ready
        return self.ready[tensor_on(self.ready.device, [0, *accumulate(self.blocks[:-1])])]

    @property
    def blocks(self) -> list[int]:
        """The number of blocks of each layer."""
        return [member.stop - member.start for member in self.members]

    def places(self) -> list[int] | None:
        """Return where in the stack these blocks are; None: they are all of it."""
        if len(self.members) == len(self.stack.members):
            return None
        return [block for member in self.members for block in range(member.start, member.stop)]

    @property
    def where(self) -> slice | Tensor:
        """The same as an index."""
        places = self.places()
        return slice(None) if places is None else tensor_on(self.stack.device, places)

    def scale_(self, scale: float | Tensor) -> list[Tensor]:
        """Multiply V by `scale`, where there is curvature; return what is still to be multiplied, all of it."""
        if self.shares is not None:
            for share in self.shares:
                assert isinstance(self.ready, Tensor)  # told by the worker, as the shares are
                share.values.mul_(torch.where(self.ready[share.block] > 0, scale, 1.0))
            return []
        if self.plain and isinstance(self.ready, Tensor):
            self.V.mul_(torch.where(self.ready > 0, scale, 1.0)[:, None, None])
            return []
        return [self.V] if self.ready is not False else []

    def clear_(self, bad: Tensor) -> None:
        """Make V zero where it is `bad` ``[N]``."""
        if not known_all(~bad):
            self.V.masked_fill_(bad[:, None, None], 0)  # a product would keep the NaN


class Gradients:
    """The gradients of one step.

    Attributes:
        entries: One for each stack with something to precondition.
    """

    def __init__(self, entries: list[Entry]) -> None:
        """Wrap `entries`."""
        self.entries = entries

    @classmethod
    def take(cls, stacks: list[BlockGroup], fallback: FallbackPolicy, *, exchanged: bool) -> Gradients:
        """Find every layer with a ``.grad``; all layers where results are to be exchanged, so that ranks agree."""
        entries = []
        for stack in stacks:
            members = [member for member in stack.members if exchanged or _has_gradient(member)]
            if members:
                entries.append(Entry(stack, members, fallback))
        return cls(entries)

    def solve(self, damping: float, runtime: Communicator) -> None:
        """Precondition the stacks that this rank works for; what has no curvature yet stays a plain gradient.

        Sharded gradients are whole for no longer than that takes: they travel some stacks at a time. At the peak this
        costs the preconditioned gradients of these stacks, which the clip must see together, and beside them the
        collected ones of `_BUCKET` bytes or of the largest stack, whichever is more, and the raw ones of those that are
        `alike`.
        """
        for bucket in self._buckets():
            gathered = _collect(bucket, runtime)
            for some in alike([entry for entry in bucket if entry.stack.role.is_gradient_worker]):
                cases = [entry.solved(damping, gathered) for entry in some]
                outcomes = some[0].fallback.replace_unsound(cases, damping)
                for entry, outcome in zip(some, outcomes, strict=True):
                    entry.settle(outcome)
            del gathered  # before the next are there

    def _buckets(self) -> Iterator[list[Entry]]:
        """Yield stacks whose sharded gradients travel together; the same on all ranks."""
        bucket: list[Entry] = []
        size = 0
        for entry in self.entries:
            stack = entry.stack
            more = stack.size * stack.outputs * stack.inputs * stack.work_dtype.itemsize
            if size and size + more > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(entry)
            size += more
        if bucket:
            yield bucket

    def clear_(self, bad: Sequence[Tensor]) -> None:
        """Make V of each entry zero where it is `bad` ``[N]``; that of others is cleared by their workers."""
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
        """Have counted which blocks of each entry were not finite, `bad` ``[N]``, and what has served its layers."""
        watch.saw_gradients(
            [Trouble(entry.stack, entry.where, own) for entry, own in zip(self.entries, bad, strict=True)]
        )
        watch.saw_levels([(entry.stack, entry.members, entry.told()) for entry in self.entries])

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
    """Yield entries that are dealt with together, as raw gradients are held at once: see `together`."""

    def nbytes(entry: Entry) -> int:
        stack = entry.stack
        return sum(entry.blocks) * stack.outputs * stack.inputs * stack.work_dtype.itemsize

    return together(entries, lambda entry: (entry.stack.device, entry.stack.work_dtype), nbytes)


def _collect(entries: Sequence[Entry], runtime: Communicator) -> dict[int, list[Piece]]:
    """Give each worker all rows of the sharded gradients that it preconditions; nobody else gets them.

    The rows come from the ranks that hold them of the worker's own copy of the model: of S ranks that share it (under
    HSDP those of one replica, otherwise all) each sends a worker 1 / S of a layer's gradient, and itself nothing.

    Returns:
        The rows by the parameter's ``id``; of plain parameters none.
    """
    wanted = [
        (slot, entry.stack.role.seat.workers)
        for entry in entries
        for member in entry.members
        for slot in member.layer.slots
    ]
    return collect_rows(wanted, _gradient, runtime, "gradients")


def _gradient(slot: Slot, rows: range) -> Tensor:
    """Return rows of the gradient, zeros where there is none, as all ranks expect them: in the parameter's dtype."""
    values, parameter = held_rows(slot, rows), slot.parameter
    if values is None:
        return torch.zeros(len(rows), *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    return values.to(parameter.dtype)


def _has_gradient(member: LayerBlocks) -> bool:
    return any(slot.parameter.grad is not None for slot in member.layer.slots)
