"""Rows become what a solve needs: each rank selects some, a layer's workers gather them, its owner makes their M."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from time import perf_counter

import torch
from torch import Tensor

from natgrad.capture.rows import RowBuffer, joined
from natgrad.capture.sums import Shares
from natgrad.curvature import kernel
from natgrad.distributed import Communicator, Plan
from natgrad.linalg import tensor_on
from natgrad.linalg.joined import together
from natgrad.linalg.products import full_products
from natgrad.preconditioner.epochs import Epochs
from natgrad.preconditioner.guard.guard import FailureCounters, Trouble
from natgrad.preconditioner.renewal.renew import compute
from natgrad.preconditioner.renewal.row_messages import gather, give
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.tensors import StateTensors


@dataclass
class Seen:
    """The rows of a layer on their way.

    Attributes:
        group: Its group.
        member: Its place there.
        samples: S of all ranks.
        share: How many rows each rank selects.
        chosen: Those of this rank; on a worker then of all of them, with Y ``[n, P, share, share]`` if there is one.
        finite: Whether the rows of each block are ``[n]`` (bool): of this rank, then of all.
        M: What a solve needs ``[n, r, r]``, made by the owner.
        fine: Whether each block succeeded.
    """

    group: BlockGroup
    member: LayerBlocks
    samples: float
    share: int
    chosen: kernel.Selection
    finite: Tensor
    M: Tensor
    fine: list[bool]

    @property
    def blocks(self) -> int:
        """The number of its blocks."""
        return self.member.stop - self.member.start


@dataclass(frozen=True, kw_only=True)
class RowRenewal:
    """What a renewal of rows needs beside them.

    Attributes:
        plan: The owners.
        runtime: The ranks.
        epochs: The training, which the choice of rows may hang on.
        watch: Counts what failed.
        damping: α.
        seed: Of the drawing of rows, which is a function of it, rank, step and layer.
        step: Completed steps.
        wire: The dtype in which rows travel, if narrower than their own.
    """

    plan: Plan[str]
    runtime: Communicator
    epochs: Epochs
    watch: FailureCounters
    damping: float
    seed: int
    step: int
    wire: torch.dtype | None

    def run(self, groups: Iterable[BlockGroup], rows: RowBuffer, shares: Shares, gain: float | Tensor) -> bool:
        """Renew what is made of rows; layers that nobody saw, and blocks that fail, keep what they had.

        Args:
            groups: Those with gathered statistics.
            rows: Theirs, of this rank; given away.
            shares: For each layer, how many tokens count of those that it was taken to have; all where it is missing.
            gain: What makes captured gradients of the loss those of per-sample losses, beside the number of samples.

        Returns:
            Whether any block of the layers that this rank works for was renewed.
        """
        gathers = rows.origin.together and self.runtime.ranks > 1
        seen = self._counted([group for group in groups if group.role.captures], rows, shares, gathers=gathers)
        if not seen:
            return False

        def kind(one: Seen) -> tuple[object, ...]:
            name = _name(one)
            return id(one.group), one.samples, one.share, shares.get(name, 1.0), repr(rows.counts(name))

        for alike in _groups(seen, kind):
            self._select(alike, rows, shares.get(_name(alike[0]), 1.0), gain)
        self.epochs.used = any(one.chosen.Y is not None for one in seen)
        if gathers:
            gather(seen, self.plan, self.runtime, self.wire)
        seen = [one for one in seen if one.group.role.is_gradient_worker]
        self._finish(seen, gathers=gathers)
        return any(flag for one in seen for flag in one.fine)

    def _counted(self, groups: Sequence[BlockGroup], rows: RowBuffer, shares: Shares, *, gathers: bool) -> list[Seen]:
        """Return the layers that any rank has seen; all ranks learn the rows and samples of each, if any `gathers`."""
        places = [(group, member) for group in groups for member in group.members]
        names = [member.layer.name for _, member in places]
        own = [float(rows.count(name)) for name in names]
        own += [rows.sample_counts[name].samples * shares.get(name, 1.0) for name in names]
        found = [own]
        if gathers and own:
            message = torch.tensor(own, dtype=torch.float64, device="cpu").to(groups[0].device)
            found = self.runtime.gather(message, {"counters": len(own)}, self.runtime.group).tolist()
        seen = []
        for index, (group, member) in enumerate(places):
            samples = sum(numbers[len(names) + index] for numbers in found)
            most = int(max(numbers[index] for numbers in found))
            if samples <= 0 or most == 0:
                continue
            # A worker that goes by its own rows alone takes as many as if all ranks had so many samples.
            origin = rows.origin
            every = samples * (1 if origin.together else origin.ranks)
            count = group.curvature.rows_per_rank(every, most, origin.ranks)
            nothing = torch.empty(0, device="cpu")
            empty = kernel.Selection(nothing, nothing, None, nothing)
            seen.append(Seen(group, member, samples, count, empty, nothing, nothing, []))
        return seen

    def _select(self, alike: list[Seen], rows: RowBuffer, share: float, gain: float | Tensor) -> None:
        """Select rows of this rank, or of each whose step this process does; of layers of a group with equally many."""
        group, started, counts = alike[0].group, perf_counter(), rows.counts(_name(alike[0]))
        # Drawn labels know nothing of the loss, its scale and its mean.
        factor = 1.0 if group.curvature.likelihood is not None else gain * share
        taken = [rows.take(_name(one), factor) if rows.count(_name(one)) else _none(one) for one in alike]
        A, G = (joined(each, 0) for each in zip(*taken, strict=True))
        finite = A.flatten(1).sum(1).isfinite() & G.flatten(1).sum(1).isfinite()
        options = {"samples": alike[0].samples, "damping": self.damping * group.factor}
        found, start = [], 0
        for rank, count in counts.items():
            a, g = A[:, start : start + count], G[:, start : start + count]
            starts = torch.cat([self._drawn(one, rank) for one in alike]).to(group.device)
            with full_products(group.device):
                found.append(group.curvature.select(a, g, alike[0].share, self.epochs, **options, starts=starts))
            start += count
        chosen = _joined(found)
        start = 0
        for one in alike:
            own = slice(start, start + one.blocks)
            Y = None if chosen.Y is None else chosen.Y[own]
            one.chosen = kernel.Selection(chosen.A[own], chosen.G[own], Y, chosen.fine[own])
            one.finite, start = finite[own], own.stop
        group.charge([one.member for one in alike], perf_counter() - started)

    def _drawn(self, one: Seen, rank: int) -> Tensor:
        """Return a random number for each block, a function of seed, rank, step and layer."""
        name = repr(("rows", self.seed, rank, self.step, one.member.layer.key))
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big") >> 1)
        return torch.rand(one.blocks, dtype=torch.float64, device="cpu", generator=generator)

    def _finish(self, seen: list[Seen], *, gathers: bool) -> None:
        """Make M of the selected rows of all ranks, each on the layer's owner, and hold all of it on its workers."""
        drafts = {}
        for own in _groups(seen, lambda one: (id(one.group),)):
            rows = max(one.chosen.A.shape[1] for one in own)
            drafts[id(own[0].group)] = (own[0].group.draft(rows), rows)
        for some in together(seen, self._place, _nbytes):
            self._invert(some, drafts[id(some[0].group)][0])
        if gathers:
            give(seen, self.plan, self.runtime)
        for own in _groups(seen, lambda one: (id(one.group),)):
            group, (fresh, rows) = own[0].group, drafts[id(own[0].group)]
            for one in own:
                fresh.write("M", one.member.blocks, group.padded("M", one.M.to(group.device), rows))
            self._judge(own)
            group.install(fresh, rows, {one.member: one.fine for one in own})

    def _place(self, one: Seen) -> tuple[torch.device, object]:
        """Return where a layer's M is made, and what else is equal for those that are made together."""
        return one.group.device, (id(one.group), one.samples, one.chosen.A.shape[1], self._owns(one))

    def _owns(self, one: Seen) -> bool:
        return self.plan.seats[one.member.layer.key].owners["M"] in (None, self.runtime.rank)

    def _invert(self, some: Sequence[Seen], fresh: StateTensors) -> None:
        """Write the rows of layers alike into what will be held; where this rank is the owner make M of them as there.

        Args:
            some: The layers.
            fresh: What their group will hold.
        """
        group, started, members = some[0].group, perf_counter(), [one.member for one in some]
        rows, own = fresh["A"].shape[1], some[0].chosen.A.shape[1]
        chosen, blocks, damping = _together([one.chosen for one in some]), _blocks(members), self.damping * group.factor
        places = blocks if isinstance(blocks, slice) else tensor_on(group.device, blocks)
        group.allocate_averages()[places] = 1  # as those that have been seen
        gathered = {"A": chosen.A, "G": chosen.G}
        if "Y" in fresh:
            gathered["Y"] = _links(chosen, damping)
        for name, values in gathered.items():
            fresh.write(name, places, group.padded(name, values, rows))
        fresh["samples"][places], fresh["damping"][places] = some[0].samples, damping
        if self._owns(some[0]):
            reads = {name: fresh.read(name, places)[:, :own].to(group.work_dtype) for name in ("A", "G")}
            reads |= {"samples": torch.tensor(some[0].samples, dtype=torch.float64, device="cpu")}
            reads |= {} if chosen.Y is None else {"Y": chosen.Y}
            (task,) = group.tasks
            with full_products(group.device):
                written, fine = compute(group.curvature, task, reads, damping, None, rows=own)
            M = written["M"]
            flags = (fine & chosen.fine & joined([one.finite for one in some], 0)).tolist()
        else:
            M = torch.zeros(len(chosen.A), own, own, dtype=group.work_dtype, device=group.device)
            flags = [False] * len(M)
        start = 0
        for one in some:
            end = start + one.blocks
            one.M, one.fine, start = M[start:end], flags[start:end], end
        group.charge(members, perf_counter() - started)

    def _judge(self, some: Sequence[Seen]) -> None:
        """Count what failed of layers of a group: rows that are not finite, or what was made of finite ones."""
        self.watch.saw_factors([Trouble(one.group, one.member.blocks, ~one.finite) for one in some])
        finite = iter(joined([one.finite for one in some], 0).tolist())
        for one in some:
            usable = list(islice(finite, one.blocks))
            made = [fine or not each for fine, each in zip(one.fine, usable, strict=True)]
            self.watch.saw_decompositions(one.group, "M", one.member.start, made)


def _joined(found: Sequence[kernel.Selection]) -> kernel.Selection:
    """Return the selections of some ranks as one, with Y ``[n, ranks, r, r]``."""
    links = [one.Y for one in found if one.Y is not None]
    A, G = (joined([getattr(one, side) for one in found], 1) for side in ("A", "G"))
    Y = torch.stack(links, 1) if links else None
    return kernel.Selection(A, G, Y, torch.stack([one.fine for one in found]).all(0))


def _links(chosen: kernel.Selection, damping: float) -> Tensor:
    """Return Y of selected rows ``[n, r, r]``."""
    A = chosen.A
    if chosen.Y is not None:
        return kernel.along_diagonal(chosen.Y)
    return torch.eye(A.shape[1], dtype=A.dtype, device=A.device).div_(damping).expand(len(A), -1, -1)


def _together(chosen: Sequence[kernel.Selection]) -> kernel.Selection:
    """Return the selections of some layers as one."""
    links = [one.Y for one in chosen if one.Y is not None]
    A, G, fine = (joined([getattr(one, name) for one in chosen], 0) for name in ("A", "G", "fine"))
    return kernel.Selection(A, G, joined(links, 0) if links else None, fine)


def _blocks(members: Sequence[LayerBlocks]) -> slice | list[int]:
    """Return the blocks of some layers, as a slice where they follow each other."""
    if all(one.stop == other.start for one, other in pairwise(members)):
        return slice(members[0].start, members[-1].stop)
    return [block for member in members for block in range(member.start, member.stop)]


def _nbytes(one: Seen) -> int:
    """Return about what it takes to make M of a layer."""
    rows = one.chosen.A.shape[1]
    return 4 * one.blocks * rows * rows * one.group.work_dtype.itemsize


def _groups(seen: Iterable[Seen], key: Callable[[Seen], tuple[object, ...]]) -> list[list[Seen]]:
    groups: dict[tuple[object, ...], list[Seen]] = {}
    for one in seen:
        groups.setdefault(key(one), []).append(one)
    return list(groups.values())


def _name(one: Seen) -> str:
    return one.member.layer.name


def _none(one: Seen) -> tuple[Tensor, Tensor]:
    """Return no rows."""
    group = one.group
    shapes = ((one.blocks, 0, size) for size in (group.inputs, group.outputs))
    a, g = (torch.zeros(shape, dtype=group.work_dtype, device=group.device) for shape in shapes)
    return a, g
