"""Refresh curvature of gathered rows: each rank selects some, a layer's workers gather them, its owner computes M.

M (`natgrad.curvature.rows`) is the inverse that preconditioning with gathered rows needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from natgrad.capture.labels import seed_of
from natgrad.capture.rows import RowBuffer
from natgrad.capture.sums import Shares
from natgrad.curvature import kernel
from natgrad.distributed import Communicator, Plan, WireFormat, narrower
from natgrad.linalg import tensor_on
from natgrad.linalg.products import full_products
from natgrad.preconditioner.epochs import EpochState
from natgrad.preconditioner.guard.guard import FailureCounters
from natgrad.preconditioner.refresh.tasks import compute
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.tensors import StateTensors

# Bytes of the kernels that are computed together.
_BATCH = 2**26

# The state of the rows of a block in a message. Selected rows: 1.
_SELECTION_FAILED, _NOT_FINITE = 0.5, 0.0


@dataclass
class RowBatch:
    """Layers of one group and one owner with equally many rows on each rank: n blocks in all.

    Attributes:
        group: The group.
        members: The layers.
        owner: The rank that computes M. None: this one.
        samples: The samples of all ranks.
        share: The number of rows that each rank selects.
        rows: The number of rows that a worker receives or uses, r.
        selection: The rows that this rank selected; on a worker after `_gather` those of all P ranks, with Y
            ``[n, P, share, share]`` if the curvature has one.
        finite: The blocks whose rows are finite ``[n]`` (bool).
        M: The result ``[n, r, r]``.
        success: Whether each block succeeded.
    """

    group: BlockGroup
    members: list[LayerBlocks]
    owner: int | None
    samples: float
    share: int
    rows: int
    selection: kernel.Selection
    finite: Tensor
    M: Tensor
    success: list[bool]

    @property
    def blocks(self) -> list[int]:
        """The indices of the blocks in the group."""
        return [block for member in self.members for block in range(member.start, member.stop)]


@dataclass(kw_only=True)
class RowRefresh:
    """The refresh of gathered rows in one step.

    Attributes:
        plan: The workers and owners; after `run` with the number of rows.
        runtime: The ranks.
        epochs: The epochs so far, on which the selection may depend.
        failure_counters: Counts failures.
        damping: α.
        seed: Seed of the random selection, which is a function of seed, rank, step and layer.
        step: Completed steps.
        wire: The dtype in which rows are sent, if narrower than their own.
    """

    plan: Plan[str]
    runtime: Communicator
    epochs: EpochState
    failure_counters: FailureCounters
    damping: float
    seed: int
    step: int
    wire: torch.dtype | None

    def run(self, groups: Iterable[BlockGroup], rows: RowBuffer, shares: Shares, gain: float | Tensor) -> bool:
        """Refresh the results of gathered rows. Layers without samples and blocks that fail keep their old results.

        Args:
            groups: The groups with gathered statistics.
            rows: The rows of this rank; removed from it.
            shares: For each layer, the part of its assumed number of tokens that counts. Missing: all.
            gain: The factor that makes captured gradients those of per-sample losses, without the number of samples.

        Returns:
            Whether any block of this rank's layers was refreshed.

        Raises:
            ValueError: on all ranks, if one would hold more than `Placement.memory` with these rows.
        """
        gathers = rows.origin.pools_ranks and self.runtime.ranks > 1
        batches = self._batches([group for group in groups if group.role.accumulates], rows, shares, gathers=gathers)
        self._count_rows(batches, gathers=gathers)
        if not batches:
            return False
        for batch in batches:
            self._select(batch, rows, shares, gain)
        self.epochs.used = any(batch.selection.Y is not None for batch in batches)
        if gathers:
            self._gather(batches)
        batches = [batch for batch in batches if batch.group.role.is_gradient_worker]
        drafts: dict[int, tuple[StateTensors, int]] = {}
        for batch in batches:
            if id(batch.group) not in drafts:
                most = max(other.selection.A.shape[1] for other in batches if other.group is batch.group)
                drafts[id(batch.group)] = batch.group.draft(most), most
            self._compute(batch, *drafts[id(batch.group)])
        if gathers:
            self._share_results(batches)
        for group in {id(batch.group): batch.group for batch in batches}.values():
            self._install([batch for batch in batches if batch.group is group], *drafts[id(group)])
        return any(any(batch.success) for batch in batches)

    def _batches(
        self, groups: Sequence[BlockGroup], rows: RowBuffer, shares: Shares, *, gathers: bool
    ) -> list[RowBatch]:
        """Return the layers that any rank has seen. If it `gathers`, all ranks exchange their numbers of rows."""
        layers = [(group, member) for group in groups for member in group.members]
        names = [member.layer.name for _, member in layers]
        local = [float(rows.count(name)) for name in names]
        local += [rows.sample_counts[name].samples * shares.get(name, 1.0) for name in names]
        found = [local]
        if gathers and local:
            message = torch.tensor(local, dtype=torch.float64, device="cpu").to(groups[0].device)
            found = self.runtime.gather(message, {"counters": len(local)}, self.runtime.group).tolist()
        batches: dict[tuple[object, ...], list[RowBatch]] = {}
        for index, (group, member) in enumerate(layers):
            samples = sum(numbers[len(names) + index] for numbers in found)
            counts = [int(numbers[index]) for numbers in found]
            if samples <= 0 or max(counts) == 0:
                continue
            origin, owner = rows.origin, self.plan.assignments[member.layer.key].owners["M"]
            # A worker that uses only its own rows selects as many as if all ranks had as many samples.
            every = samples * (1 if origin.pools_ranks else origin.ranks)
            share = group.curvature.rows_per_rank(every, max(counts), origin.ranks)
            key = id(group), owner, samples, *counts, *rows.counts(member.layer.name).items()
            similar = batches.setdefault(key, [])
            selected = share * (origin.ranks if origin.pools_ranks else 1)
            layer_bytes = 4 * (member.stop - member.start) * selected**2 * group.work_dtype.itemsize
            if not similar or (len(similar[-1].members) + 1) * layer_bytes > _BATCH:
                nothing = torch.empty(0, device="cpu")
                selection = kernel.Selection(nothing, nothing, None, nothing)
                similar.append(RowBatch(group, [], owner, samples, share, selected, selection, nothing, nothing, []))
            similar[-1].members.append(member)
        return [batch for similar in batches.values() for batch in similar]

    def _count_rows(self, batches: Sequence[RowBatch], *, gathers: bool) -> None:
        """Write the number of rows of each layer into the plan, and check `Placement.memory`."""
        counts: dict[str, int] = {}
        for batch in batches:
            # The layers of a group are padded to equally many rows.
            for member in batch.group.members:
                counts[member.layer.key] = max(counts.get(member.layer.key, 0), batch.rows)
        if self.plan.placement.memory is not None and self.runtime.ranks > 1 and not gathers:
            # Under "dp" a rank counts the rows of its own layers, and the ranks have to decide alike.
            counts = {key: n for found in self.runtime.all_gather_objects(counts) for key, n in found.items()}
        self.plan = replace(self.plan, rows={**self.plan.rows, **counts})
        self.plan.check_memory()

    def _select(self, batch: RowBatch, rows: RowBuffer, shares: Shares, gain: float | Tensor) -> None:
        """Select rows of this rank, or of each rank that this process simulates."""
        group, started = batch.group, perf_counter()
        names = [member.layer.name for member in batch.members]
        counts = rows.counts(names[0])
        if any(counts.values()):
            # The gradients of sampled labels do not depend on the loss, its scale or its mean.
            gains = [1.0 if group.curvature.likelihood is not None else gain * shares.get(name, 1.0) for name in names]
            taken = [rows.take(name, factor) for name, factor in zip(names, gains, strict=True)]
            A, G = (torch.cat(pieces) for pieces in zip(*taken, strict=True))
        else:
            shapes = ((len(batch.blocks), 0, size) for size in (group.inputs, group.outputs))
            A, G = (torch.zeros(shape, dtype=group.work_dtype, device=group.device) for shape in shapes)
        batch.finite = A.flatten(1).sum(1).isfinite() & G.flatten(1).sum(1).isfinite()
        options = {"samples": batch.samples, "damping": self.damping * group.factor}
        found = []
        for rank, a, g in zip(counts, A.split([*counts.values()], 1), G.split([*counts.values()], 1), strict=True):
            starts = torch.cat([self._drawn(member, rank) for member in batch.members]).to(group.device)
            with full_products(group.device):
                found.append(group.curvature.select(a, g, batch.share, self.epochs, **options, starts=starts))
        links = [selection.Y for selection in found if selection.Y is not None]
        batch.selection = kernel.Selection(
            torch.cat([selection.A for selection in found], 1),
            torch.cat([selection.G for selection in found], 1),
            torch.stack(links, 1) if links else None,
            torch.stack([selection.fine for selection in found]).all(0),
        )
        group.charge(batch.members, perf_counter() - started)

    def _drawn(self, member: LayerBlocks, rank: int) -> Tensor:
        """Return a random number for each block, a function of seed, rank, step and layer."""
        seed = seed_of("rows", self.seed, rank, self.step, member.layer.key)
        generator = torch.Generator("cpu").manual_seed(seed)
        return torch.rand(member.stop - member.start, dtype=torch.float64, device="cpu", generator=generator)

    def _compute(self, batch: RowBatch, draft: StateTensors, rows: int) -> None:
        """Write selected rows into the new results of their group, and compute M of them on its owner."""
        group, started, damping = batch.group, perf_counter(), self.damping * batch.group.factor
        selection, blocks = batch.selection, tensor_on(group.device, batch.blocks)
        selected = selection.A.shape[1]
        group.allocate_averages()[blocks] = 1  # as for blocks with statistics
        for name, values in (("A", selection.A), ("G", selection.G)):
            draft.write(name, blocks, group.padded(name, values, rows))
        draft["samples"][blocks], draft["damping"][blocks] = batch.samples, damping
        n = len(batch.blocks)
        batch.M = torch.zeros(n, selected, selected, dtype=group.work_dtype, device=group.device)
        batch.success = [False] * n
        if batch.owner in (None, self.runtime.rank):
            # From the rows as they are stored, which may be rounded.
            reads = {name: draft.read(name, blocks)[:, :selected].to(group.work_dtype) for name in ("A", "G")}
            reads["samples"] = torch.tensor(batch.samples, dtype=torch.float64, device="cpu")
            if selection.Y is not None:
                reads["Y"] = selection.Y
            (task,) = group.tasks
            with full_products(group.device):
                written, fine = compute(group.curvature, task, reads, damping, None, rows=selected)
            batch.M, batch.success = written["M"], (fine & selection.fine & batch.finite).tolist()
        group.charge(batch.members, perf_counter() - started)

    def _install(self, batches: Sequence[RowBatch], draft: StateTensors, rows: int) -> None:
        """Replace the results of a group, and count the failures: non-finite rows, or a failed M of finite ones."""
        group, success = batches[0].group, {}
        for batch in batches:
            blocks = tensor_on(group.device, batch.blocks)
            draft.write("M", blocks, group.padded("M", batch.M.to(group.device), rows))
            self.failure_counters.count_skipped_factors(group, blocks, ~batch.finite)
            flags, finite = batch.success, batch.finite.tolist()
            for member in batch.members:
                n = member.stop - member.start
                success[member], flags = flags[:n], flags[n:]
                made = [fine or not usable for fine, usable in zip(success[member], finite[:n], strict=True)]
                finite = finite[n:]
                self.failure_counters.count_failed_decompositions(group, "M", member.start, made)
        group.install(draft, rows, success)

    # --- Messages -----------------------------------------------------------------------------------------------

    def _gather(self, batches: Sequence[RowBatch]) -> None:
        """Replace the rows that each rank selected by those of all ranks, on the workers of each layer.

        A layer's n workers receive n (P - 1) / P r (i + o) elements together, with Y n (P - 1) r² / P² more, and a
        counter for each block. Y is never rounded: it might not stay definite.
        """
        columns, runtime = self.plan.columns, self.runtime
        for similar in _by_place(batches):
            messages: dict[int, _RowMessage] = {}
            for column in range(columns):
                own = [batch for batch in similar if self.plan.column_of(batch.members[0].layer.key) == column]
                if own:
                    messages[column] = _RowMessage(own, self.wire)
            mine = messages.get(runtime.rank % columns)
            if columns == 1:
                arrived = runtime.gather(messages[0].message, messages[0].kinds, runtime.group)
            else:
                arrived = self._send(messages, mine)
            if mine is not None:
                mine.unpack(arrived)

    def _send(self, messages: Mapping[int, _RowMessage], mine: _RowMessage | None) -> Tensor:
        """Send each message to the workers of its column, and return what this rank received ``[P, size]``."""
        outgoing: list[list[Tensor]] = [[] for _ in range(self.runtime.ranks)]
        for column, message in messages.items():
            workers = self.plan.column(column)
            for worker in workers:
                outgoing[worker].append(message.message)
            self.runtime.count(message.kinds, len(workers) - (message is mine))
        size, device = 0 if mine is None else len(mine.message), next(iter(messages.values())).message.device
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        vectors = [torch.cat([nothing, *parts]) for parts in outgoing]
        return torch.stack(self.runtime.redistribute(vectors, [size] * self.runtime.ranks))

    def _share_results(self, batches: Sequence[RowBatch]) -> None:
        """Send each M of a layer's owner to its n workers: (n - 1) r² elements, with a counter for each block.

        M is never rounded to a narrower dtype: preconditioning subtracts a product with M from the gradient, which
        multiplies the rounding error of M by the largest eigenvalue over α.
        """
        workers = self.plan.column(self.runtime.rank)
        if len(workers) == 1:
            return
        self.runtime.subgroup(workers)  # collective on all ranks, also if some columns have nothing to share yet
        for similar in _by_place(batches):
            owned = [[batch for batch in similar if batch.owner == worker] for worker in workers]
            sizes = [(sum(batch.M.numel() for batch in own), sum(len(batch.M) for batch in own)) for own in owned]
            mine, like = owned[workers.index(self.runtime.rank)], similar[0].M
            values = torch.cat([like.new_empty(0), *(batch.M.flatten() for batch in mine)])
            flags = tensor_on(like.device, [float(flag) for batch in mine for flag in batch.success], like.dtype)
            shared = self.runtime.share_from_owners((values, flags), sizes, "inverses", ranks=workers)
            for own, (numbers, counters) in zip(owned, shared, strict=True):
                success = iter(counters.tolist())
                for batch, M in zip(own, numbers.split([batch.M.numel() for batch in own]), strict=True):
                    batch.M, batch.success = M.view_as(batch.M), [next(success) > 0 for _ in batch.success]


class _RowMessage:
    """The message of one rank with its rows of layers with the same workers, dtype and device.

    Attributes:
        message: Its bytes.
        kinds: The number of bytes of each kind.
    """

    def __init__(self, batches: Sequence[RowBatch], wire: torch.dtype | None) -> None:
        """Pack the selected rows."""
        self._batches, group = batches, batches[0].group
        states = [
            torch.where(batch.selection.fine, 1.0, _SELECTION_FAILED).where(batch.finite, _NOT_FINITE)
            for batch in batches
        ]
        narrow = [rows.flatten() for batch in batches for rows in (batch.selection.A, batch.selection.G)]
        links = [batch.selection.Y.flatten() for batch in batches if batch.selection.Y is not None]
        counters = torch.cat(states).to(group.work_dtype)
        self._layout = WireFormat(
            wide=sum(map(len, links)) + len(counters),
            narrow=sum(map(len, narrow)),
            dtype=group.work_dtype,
            wire=narrower(wire, group.work_dtype),
        )
        message = self._layout.empty(1, group.device)
        # Non-finite numbers are not used, and must not spoil the scale of their neighbours.
        self._layout.write(
            message, torch.cat([*links, counters])[None], [rows.nan_to_num(0, 0, 0)[None] for rows in narrow]
        )
        counted = len(counters) * self._layout.dtype.itemsize
        self.message, self.kinds = message[0], {"rows": self._layout.payload - counted, "counters": counted}

    def unpack(self, arrived: Tensor) -> None:
        """Replace the rows by those of all messages ``[P, size]``."""
        wide, narrow = self._layout.read(arrived)
        batches, ranks = self._batches, len(arrived)
        rows = iter(
            narrow.split([part.numel() for batch in batches for part in (batch.selection.A, batch.selection.G)], 1)
        )
        linked = [0 if batch.selection.Y is None else batch.selection.Y.numel() for batch in batches]
        *links, counters = wide.split([*linked, sum(len(batch.finite) for batch in batches)], 1)
        states = iter(counters.amin(0).split([len(batch.finite) for batch in batches]))
        for batch, link in zip(batches, links, strict=True):
            A, G = (
                next(rows).view(ranks, *like.shape).transpose(0, 1).flatten(1, 2)
                for like in (batch.selection.A, batch.selection.G)
            )
            Y = None
            if batch.selection.Y is not None:
                Y = link.view(ranks, *batch.selection.Y.shape).transpose(0, 1).flatten(1, 2)
            state = next(states)
            batch.finite = state > _NOT_FINITE
            batch.selection = kernel.Selection(A, G, Y, state > _SELECTION_FAILED)


def _by_place(batches: Sequence[RowBatch]) -> list[list[RowBatch]]:
    """Return the batches of each device and dtype."""
    places: dict[tuple[torch.device, torch.dtype], list[RowBatch]] = {}
    for batch in batches:
        places.setdefault((batch.group.device, batch.group.work_dtype), []).append(batch)
    return list(places.values())
