"""Refresh curvature of gathered rows: each rank selects some, a layer's workers gather them, its owner computes M.

M (`natgrad.curvature.rows`) is the inverse that preconditioning with gathered rows needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from typing_extensions import override

from natgrad.capture.sampled import seed_of
from natgrad.capture.sums import RowBuffer, Share, Shares
from natgrad.curvature import kernel
from natgrad.distributed import Communicator, Plan, WireFormat, narrower
from natgrad.linalg import tensor_on
from natgrad.linalg.device import full_products
from natgrad.preconditioner.guard.guard import FailureCounters
from natgrad.preconditioner.refresh.tasks import TaskRun, compute, conclude
from natgrad.profiling import profiled
from natgrad.state.averages import allocate_averages
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.epochs import EpochState
from natgrad.state.results import allocate_results, draft, padded, record_results, resize
from natgrad.state.tensors import StateTensors

# Bytes of the kernels that are computed together.
_BATCH = 2**26

# The state of the rows of a block in a message. Selected rows: 1.
_SELECTION_FAILED, _NOT_FINITE = 0.5, 0.0


@dataclass(kw_only=True)
class RowRun(TaskRun):
    """The task M of layers of one group and one owner with equally many rows on each rank: n blocks in all.

    Attributes:
        share: The number of rows that each rank selects.
        selection: The rows that this rank selected; on a worker after `_gather` those of all P ranks, with Y
            ``[n, P, share, share]`` if the curvature has one.
        finite: The blocks whose rows are finite ``[n]`` (bool).
        fresh: The new results of these blocks, from 0 to ``n - 1``, on a worker.
    """

    layers: list[LayerBlocks]
    samples: float
    share: int
    selection: kernel.Selection = field(init=False)
    finite: Tensor = field(init=False)
    fresh: StateTensors = field(init=False)

    @property
    @override
    def blocks(self) -> list[int]:
        return [block for member in self.layers for block in range(member.start, member.stop)]

    @property
    @override
    def results(self) -> StateTensors:
        return self.fresh

    @property
    @override
    def stored(self) -> torch.dtype:
        # M is never rounded: preconditioning subtracts a product with M from the gradient, which multiplies the
        # rounding error of M by the largest eigenvalue over α.
        return self.group.work_dtype

    def prepare(self, damping: float) -> None:
        """Store the selected rows and what is used with them."""
        group, whole = self.group, slice(None)
        allocate_averages(group)[self.blocks] = 1  # as for blocks with statistics
        self.fresh = draft(group, self.stop, self.rows)
        self.fresh.write("A", whole, self.selection.A)
        self.fresh.write("G", whole, self.selection.G)
        self.fresh["samples"][:], self.fresh["damping"][:] = self.samples, damping * group.factor
        self.success = [0.0] * self.stop

    @override
    def run(self, damping: float) -> None:
        group = self.group
        # From the rows as they are stored, which may be rounded.
        reads = {name: self.fresh.read(name, slice(None)).to(group.work_dtype) for name in ("A", "G")}
        reads["samples"] = torch.tensor(self.samples, dtype=torch.float64, device="cpu")
        if self.selection.Y is not None:
            reads["Y"] = self.selection.Y
        with full_products(group.device):
            written, fine = compute(group.curvature, self.task, reads, damping * group.factor, None, self.rows)
        self.fresh.write("M", slice(None), written["M"])
        self.success = [float(flag) for flag in (fine & self.selection.fine & self.finite).tolist()]

    @override
    def record(self, failure_counters: FailureCounters) -> None:
        """Move what succeeded to the group, and count the failures: non-finite rows, or a failed M of finite ones."""
        group, success = self.group, self.succeeded
        blocks = tensor_on(group.device, self.blocks)
        failure_counters.count_skipped_factors(group, blocks, ~self.finite)
        if any(success):
            resize(group, max(self.rows, group.state.rows))
            results, fine = allocate_results(group), tensor_on(group.device, success)
            for name in self.fresh:
                results.write(name, blocks[fine], padded(group, name, self.fresh.read(name, fine)))
        record_results(group, self.task.name, self.blocks, success)
        made = [fine or not usable for fine, usable in zip(success, self.finite.tolist(), strict=True)]
        failure_counters.count_failed_decompositions(group, self.task.name, self.blocks, made)


@dataclass(kw_only=True)
class RowRefresh:
    """The refresh of gathered rows in one step. `run` writes the number of rows into the plan.

    The random selection is a function of seed, rank, step and layer.
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
        """Refresh the results of gathered rows, and return whether any block of this rank's layers was refreshed.

        Layers without samples and blocks that fail keep their old results. Rows that are used are removed from `rows`.
        `gain` makes captured gradients those of per-sample losses, without the number of samples.

        Raises:
            ValueError: on all ranks, if one would hold more than `Placement.memory` with these rows.
        """
        gathers = not self.plan.placement.rule.uses_own_samples and self.runtime.ranks > 1
        runs = self._runs([group for group in groups if group.role.accumulates], rows, shares, gathers=gathers)
        self._count_rows(runs, gathers=gathers)
        if not runs:
            return False
        with profiled("select"):
            for run in runs:
                self._select(run, rows, shares, gain)
        self.epochs.used = any(run.selection.Y is not None for run in runs)
        if gathers:
            self._gather(runs)
        runs = [run for run in runs if run.group.role.is_gradient_worker]
        with profiled("decompose"):
            for run in runs:
                run.prepare(self.damping)
                if run.owner == self.runtime.rank:
                    run.run(self.damping)
        conclude(runs, self.plan.column(self.runtime.rank), self.runtime, self.failure_counters, None)
        for group in dict.fromkeys(run.group for run in runs):
            group_runs = [run for run in runs if run.group is group]
            if sum(sum(run.succeeded) for run in group_runs) == group.size:
                resize(group, max(run.rows for run in group_runs))  # no block needs more now
        return any(any(run.succeeded) for run in runs)

    def _runs(self, groups: Sequence[BlockGroup], rows: RowBuffer, shares: Shares, *, gathers: bool) -> list[RowRun]:
        """Return the runs of layers that any rank has seen. If it `gathers`, all ranks exchange their counts."""
        layers = [(group, member) for group in groups for member in group.members]
        names = [member.layer.name for _, member in layers]
        local = [float(rows.count(name)) for name in names]
        local += [float(rows.sample_counts[name].samples * shares.get(name, Share()).samples) for name in names]
        found = [local]
        if gathers and local:
            message = torch.tensor(local, dtype=torch.float64, device="cpu").to(groups[0].device)
            found = self.runtime.gather(message, "counters").tolist()
        runs: dict[tuple[object, ...], list[RowRun]] = {}
        for index, (group, member) in enumerate(layers):
            samples = sum(numbers[len(names) + index] for numbers in found)
            counts = [int(numbers[index]) for numbers in found]
            if samples <= 0 or max(counts) == 0:
                continue
            owner, ranks = self.plan.assignments[member.layer.key].owners["M"], self.runtime.ranks
            # A worker that uses only its own rows selects as many as if all ranks had as many samples.
            share = group.curvature.rows_per_rank(samples if gathers else samples * ranks, max(counts), ranks)
            similar = runs.setdefault((id(group), owner, samples, *counts), [])
            selected = share * ranks if gathers else share
            layer_bytes = 4 * (member.stop - member.start) * selected**2 * group.work_dtype.itemsize
            if not similar or (len(similar[-1].layers) + 1) * layer_bytes > _BATCH:
                (task,) = group.tasks
                run = RowRun(
                    owner, group, task, start=0, stop=0, rows=selected, layers=[], samples=samples, share=share
                )
                similar.append(run)
            similar[-1].layers.append(member)
            similar[-1].stop += member.stop - member.start
        return [run for similar in runs.values() for run in similar]

    def _count_rows(self, runs: Sequence[RowRun], *, gathers: bool) -> None:
        """Write the number of rows of each layer into the plan, and check `Placement.memory`."""
        counts: dict[str, int] = {}
        for run in runs:
            # The layers of a group are padded to equally many rows.
            for member in run.group.members:
                counts[member.layer.key] = max(counts.get(member.layer.key, 0), run.rows)
        if self.plan.placement.memory is not None and self.runtime.ranks > 1 and not gathers:
            # Under "dp" a rank counts the rows of its own layers, and the ranks have to decide alike.
            counts = {key: n for found in self.runtime.all_gather_objects(counts) for key, n in found.items()}
        self.plan = replace(self.plan, rows={**self.plan.rows, **counts})
        self.plan.check_memory()

    def _select(self, run: RowRun, rows: RowBuffer, shares: Shares, gain: float | Tensor) -> None:
        """Select rows of this rank."""
        group = run.group
        names = [member.layer.name for member in run.layers]
        if rows.count(names[0]):
            # The gradients of sampled labels do not depend on the loss, its scale or its mean.
            drawn = group.curvature.likelihood is not None
            gains = [1.0 if drawn else gain * shares.get(name, Share()).gradients for name in names]
            taken = [rows.take(name, factor) for name, factor in zip(names, gains, strict=True)]
            A, G = (torch.cat(pieces) for pieces in zip(*taken, strict=True))
        else:
            shapes = ((len(run.blocks), 0, size) for size in (group.inputs, group.outputs))
            A, G = (torch.zeros(shape, dtype=group.work_dtype, device=group.device) for shape in shapes)
        run.finite = A.flatten(1).sum(1).isfinite() & G.flatten(1).sum(1).isfinite()
        options = {"samples": run.samples, "damping": self.damping * group.factor}
        starts = torch.cat([self._drawn(member) for member in run.layers]).to(group.device)
        with full_products(group.device):
            selection = group.curvature.select(A, G, run.share, self.epochs, **options, starts=starts)
        run.selection = replace(selection, Y=None if selection.Y is None else selection.Y[:, None])

    def _drawn(self, member: LayerBlocks) -> Tensor:
        """Return a random number for each block, a function of seed, rank, step and layer."""
        seed = seed_of("rows", self.seed, self.runtime.rank, self.step, member.layer.key)
        generator = torch.Generator("cpu").manual_seed(seed)
        return torch.rand(member.stop - member.start, dtype=torch.float64, device="cpu", generator=generator)

    # --- Messages -----------------------------------------------------------------------------------------------

    def _gather(self, runs: Sequence[RowRun]) -> None:
        """Replace the rows that each rank selected by those of all ranks, on the workers of each layer.

        A layer's n workers receive n (P - 1) / P r (i + o) elements together, with Y n (P - 1) r² / P² more, and the
        state of each block's rows. Y is never rounded: it might not stay definite.
        """
        columns, runtime = self.plan.columns, self.runtime
        places: dict[tuple[torch.device, torch.dtype], list[RowRun]] = {}
        for run in runs:
            places.setdefault((run.group.device, run.group.work_dtype), []).append(run)
        for similar in places.values():
            messages: dict[int, _RowMessage] = {}
            for column in range(columns):
                own = [run for run in similar if self.plan.column_of(run.layers[0].layer.key) == column]
                if own:
                    messages[column] = _RowMessage(own, self.wire)
            mine = messages.get(runtime.rank % columns)
            arrived = runtime.gather(messages[0].message, "rows") if columns == 1 else self._send(messages, mine)
            if mine is not None:
                mine.unpack(arrived)

    def _send(self, messages: Mapping[int, _RowMessage], mine: _RowMessage | None) -> Tensor:
        """Send each message to the workers of its column, and return what this rank received ``[P, size]``."""
        outgoing: list[list[Tensor]] = [[] for _ in range(self.runtime.ranks)]
        for column, message in messages.items():
            workers = self.plan.column(column)
            for worker in workers:
                outgoing[worker].append(message.message)
            self.runtime.count("rows", message.message.nbytes * (len(workers) - (message is mine)))
        size, device = 0 if mine is None else len(mine.message), next(iter(messages.values())).message.device
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        vectors = [torch.cat([nothing, *parts]) for parts in outgoing]
        return torch.stack(self.runtime.post_redistribute(vectors, [size] * self.runtime.ranks, "rows").wait())


class _RowMessage:
    """The message of one rank with its rows of layers with the same workers, dtype and device."""

    def __init__(self, runs: Sequence[RowRun], wire: torch.dtype | None) -> None:
        """Pack the selected rows: A and G of each run as narrow numbers, each Y and then all states as wide ones."""
        self._runs, group = runs, runs[0].group
        selected = [torch.where(run.selection.fine, 1.0, _SELECTION_FAILED) for run in runs]
        finite = [run.finite for run in runs]
        states = torch.cat(selected).where(torch.cat(finite), _NOT_FINITE).to(group.work_dtype)
        narrow = [rows.flatten() for run in runs for rows in (run.selection.A, run.selection.G)]
        Ys = [run.selection.Y.flatten() for run in runs if run.selection.Y is not None]
        self._layout = WireFormat(
            wide=sum(map(len, Ys)) + len(states),
            narrow=sum(map(len, narrow)),
            dtype=group.work_dtype,
            wire=narrower(wire, group.work_dtype),
        )
        message = self._layout.empty(1, group.device)
        # Non-finite numbers are not used, and must not spoil the scale of their neighbours.
        self._layout.write(message, torch.cat(narrow).nan_to_num(0, 0, 0)[None], torch.cat([*Ys, states])[None])
        self.message = message[0]

    def unpack(self, arrived: Tensor) -> None:
        """Replace the rows by those of all messages ``[P, size]``."""
        wide, narrow = self._layout.read(arrived)
        runs, ranks = self._runs, len(arrived)
        rows = iter(narrow.split([part.numel() for run in runs for part in (run.selection.A, run.selection.G)], 1))
        blocks = [len(run.finite) for run in runs]
        sizes = [0 if run.selection.Y is None else run.selection.Y.numel() for run in runs]
        *Ys, all_states = wide.split([*sizes, sum(blocks)], 1)
        states = all_states.amin(0).split(blocks)  # the worst of all ranks
        for run, sent, state in zip(runs, Ys, states, strict=True):
            A, G = (
                next(rows).view(ranks, *like.shape).transpose(0, 1).flatten(1, 2)
                for like in (run.selection.A, run.selection.G)
            )
            Y = None
            if run.selection.Y is not None:
                Y = sent.view(ranks, *run.selection.Y.shape).transpose(0, 1).flatten(1, 2)
            run.finite = state > _NOT_FINITE
            run.selection = kernel.Selection(A, G, Y, state > _SELECTION_FAILED)
