"""The raw sums of a step, which hooks add to flat buckets, and the rows of curvatures with gathered statistics.

Symmetric matrices are stored as triangles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from natgrad.curvature.base import Sums
from natgrad.distributed import Communicator, Work, narrower
from natgrad.errors import NatgradError
from natgrad.linalg import tensor_on
from natgrad.linalg.precision import at_least_float32
from natgrad.refresh.rule import SIDES, Side
from natgrad.specs import Statistic
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.tensors import pack, packed_shape


@dataclass(frozen=True)
class Share:
    """The fraction of a layer's terms of the loss that count, as numbers or device tensors.

    Attributes:
        samples: For the number of samples.
        rows: For the number of rows.
        gradients: The factor that makes gradients, scaled by the number of all terms, those of the terms that count.
    """

    samples: float | Tensor = 1.0
    rows: float | Tensor = 1.0
    gradients: float | Tensor = 1.0

    def to(self, device: torch.device) -> Share:
        """Return the same share with its tensors on a device."""
        parts = (self.samples, self.rows, self.gradients)
        return Share(*(part.to(device) if isinstance(part, Tensor) else part for part in parts))


# By layer name. Missing: all terms count.
Shares: TypeAlias = Mapping[str, Share]
_ALL = Share()


def of_sides(group: BlockGroup, sides: Collection[Side]) -> list[Statistic]:
    """Return the statistics of a group that are of inputs (`BlockGroup.input_statistics`), of gradients, or of both."""
    inputs = group.input_statistics
    return [spec for spec in group.statistics if ("inputs" if spec.name in inputs else "gradients") in sides]


@dataclass
class SampleCount:
    """The number of samples in the sums of one layer since the last step.

    Attributes:
        samples: The number of samples. All uses of a layer in one backward pass have the same samples.
        rows: Samples times positions, summed over all uses.
        beyond: The rows of uses with more rows than the loss has terms (token losses), whose masks are unknown.
        task_samples: The samples counted for that pass.
    """

    samples: int = 0
    rows: int = 0
    beyond: int = 0
    task: int | None = None
    task_samples: int = 0

    def known(self, task: int) -> int:
        """Return the samples counted for the backward pass `task`, if it is the last one."""
        return self.task_samples if task == self.task else 0

    def count(self, task: int, samples: int, rows: int, *, beyond: bool) -> None:
        """Count one use in the backward pass `task`."""
        known = self.known(task)
        self.samples += max(0, samples - known)
        self.task, self.task_samples = task, max(samples, known)
        self.rows += rows
        self.beyond += rows if beyond else 0


@dataclass
class BlockSums:
    """The sums ``[n, *packed_shape(spec)]`` of n blocks, and their samples and samples times positions ``[n]``.

    Attributes:
        finite: Whether the sums of each block are finite on all ranks ``[n]`` (bool). None: not asked.
    """

    group: BlockGroup
    blocks: slice
    sums: dict[str, Tensor]
    samples: Tensor
    rows: Tensor
    finite: Tensor | None = None


@dataclass
class LayerRun:
    """Consecutive layers of a group, and their collected statistics."""

    group: BlockGroup
    members: list[LayerBlocks]
    specs: list[Statistic]

    @property
    def blocks(self) -> slice:
        """The positions of their blocks in the group."""
        return slice(self.members[0].start, self.members[-1].stop)


class Bucket:
    """A buffer of sums that are sent together: the statistics, then the numbers of samples and rows of each layer.

    Attributes:
        names: Their names, in the order of the buffer.
        role: This rank's role for all of them.
        numel: The number of elements of the buffer.
        views: Views of the statistics of each layer in the buffer.
    """

    def __init__(self, layers: Iterable[tuple[BlockGroup, LayerBlocks, list[Statistic]]]) -> None:
        self.runs = _runs(layers)
        self.names = [member.layer.name for run in self.runs for member in run.members]
        self.role = self.runs[0].group.role
        self._counters = 2 * len(self.names)
        self.numel = self._counters + sum(prod(shape) for run in self.runs for _, shape in _shapes(run))
        self.release()

    def release(self) -> None:
        """Drop the buffer."""
        self.buffer: Tensor | None = None
        self.views: dict[str, dict[str, Tensor]] = {}
        self._works: list[Work] = []

    def allocate(self) -> Tensor:
        """Return the buffer; a new one is uninitialized."""
        if self.buffer is None:
            group = self.runs[0].group
            self.buffer = torch.empty(self.numel, dtype=group.dtype, device=group.device)
            for run, sums in zip(self.runs, self._sums(self.buffer), strict=True):
                start = run.blocks.start
                for member in run.members:
                    blocks = slice(member.start - start, member.stop - start)
                    self.views[member.layer.name] = {name: tensor[blocks] for name, tensor in sums.items()}
        return self.buffer

    def _sums(self, buffer: Tensor) -> Iterator[dict[str, Tensor]]:
        """Yield the statistics of each run."""
        offset = 0
        for run in self.runs:
            sums = {}
            for name, shape in _shapes(run):
                end = offset + prod(shape)
                sums[name] = buffer[offset:end].view(shape)
                offset = end
            yield sums

    def messages(self, wire: torch.dtype | None) -> list[tuple[Tensor, torch.dtype | None]]:
        """Return the parts of the buffer that are sent apart, with the dtype of each: counters are never rounded."""
        buffer = self.allocate()
        if narrower(wire, buffer.dtype) == buffer.dtype:
            return [(buffer, None)]
        sums, counters = buffer.split([self.numel - self._counters, self._counters])
        return [(sums, wire), (counters, None)]

    def close(self, counts: Mapping[str, SampleCount], shares: Shares, gain: float | Tensor) -> None:
        """Complete the buffer for sending, as `StatisticsBuffer.close`."""
        buffer, counters = self.allocate(), list[float | Tensor]()
        for run in self.runs:
            for member in run.members:
                name = member.layer.name
                count, share = counts[name], shares.get(name, _ALL)
                rows = count.beyond + (count.rows - count.beyond) * share.rows
                if count.rows:
                    self._scale(
                        run, name, gain * share.gradients, {"sample": share.samples, "position": rows / count.rows}
                    )
                else:
                    torch._foreach_zero_(list(self.views[name].values()))
                counters += [count.samples * share.samples, rows]
        buffer[self.numel - len(counters) :] = _vector(counters, buffer)

    def _scale(self, run: LayerRun, name: str, factor: float | Tensor, shares: Mapping[str, float | Tensor]) -> None:
        """Multiply the gradients in a layer's sums by `factor`, and counts by the share of their divisor."""
        # Gradients of sampled labels do not depend on the scale and the mean of the loss.
        scales = run.group.curvature.likelihood is None and not (isinstance(factor, float) and factor == 1.0)
        for spec in run.specs:
            if spec.gradient_power and scales:
                self.views[name][spec.name].mul_(factor**spec.gradient_power)
            elif spec.counts_positions and shares:
                self.views[name][spec.name].mul_(shares[spec.per])

    def scale_gradients(self, gain: float | Tensor) -> None:
        """Multiply gradients by a gain, if `close` was called with a gain of 1."""
        for run in self.runs:
            for member in run.members:
                self._scale(run, member.layer.name, gain, {})

    def post(
        self,
        runtime: Communicator,
        wire: torch.dtype | None,
        group: ProcessGroup | None,
        *,
        finishes_alone: bool = False,
    ) -> list[Work]:
        """Start to sum the closed bucket over all ranks, in the queue of a process group (`Communicator.post_sum`)."""
        self._works = [
            runtime.post_sum(part, "factors", sent, group, finishes_alone=finishes_alone)
            for part, sent in self.messages(wire)
        ]
        return self._works

    def wait(self) -> None:
        """Wait for the sums of all ranks, if they are in progress."""
        for work in self._works:
            work.wait()

    def drop(self) -> None:
        """Wait until the buffer may be freed, without completing the sum; collective."""
        for work in self._works:
            work.drop()

    def split_off(self) -> Bucket:
        """Move the buffer to a new bucket, and return that."""
        moved = copy(self)
        self.release()
        return moved

    def add(self, other: Bucket) -> None:
        """Add the buffer of a bucket with the same layout. Do not use `other` afterwards."""
        assert other.buffer is not None
        if self.buffer is None:
            self.buffer, self.views = other.buffer, other.views
        else:
            self.buffer.add_(other.buffer)

    def arrived(self) -> Iterator[BlockSums]:
        """Yield the sums of each run, on the current device of its layers."""
        assert self.buffer is not None
        counters = self.buffer[self.numel - self._counters :].view(-1, 2)
        for run, sums in zip(self.runs, self._sums(self.buffer), strict=True):
            counts, counters = counters.split([len(run.members), len(counters) - len(run.members)])
            size = run.blocks.stop - run.blocks.start
            if size != len(run.members):
                repeats = tensor_on(counts.device, [member.stop - member.start for member in run.members])
                counts = counts.repeat_interleave(repeats, dim=0, output_size=size)
            place = run.group.device, run.group.dtype
            moved = {name: tensor.to(*place) for name, tensor in sums.items()}
            yield BlockSums(run.group, run.blocks, moved, counts[:, 0].to(*place), counts[:, 1].to(*place))


def _vector(numbers: Sequence[float | Tensor], like: Tensor) -> Tensor:
    """Return numbers, some of which may be device tensors, as a vector, without waiting for the device."""
    known = [0.0 if isinstance(number, Tensor) else number for number in numbers]
    vector = tensor_on(like.device, known, like.dtype)
    places = [index for index, number in enumerate(numbers) if isinstance(number, Tensor)]
    if places:
        others = torch.stack([number.to(vector) for number in numbers if isinstance(number, Tensor)])
        vector[tensor_on(like.device, places, torch.int64)] = others
    return vector


def _shapes(run: LayerRun) -> list[tuple[str, tuple[int, ...]]]:
    size = run.blocks.stop - run.blocks.start
    return [(spec.name, (size, *packed_shape(spec))) for spec in run.specs]


def _runs(layers: Iterable[tuple[BlockGroup, LayerBlocks, list[Statistic]]]) -> list[LayerRun]:
    """Return the layers of each group as runs, joining neighbours; layers of a group have the same statistics."""
    groups: dict[int, list[LayerRun]] = {}
    for group, member, specs in layers:
        groups.setdefault(id(group), []).append(LayerRun(group, [member], specs))
    runs: list[LayerRun] = []
    for singles in groups.values():
        for single in sorted(singles, key=lambda run: run.blocks.start):
            last = runs[-1] if runs else None
            if last is not None and last.group is single.group and last.blocks.stop == single.blocks.start:
                last.members += single.members
            else:
                runs.append(single)
    return runs


class StatisticsBuffer:
    """Raw sums and sample counts of all layers.

    A bucket is allocated when the first of its layers is captured, and freed when it has been read, so that none exists
    at the end of a forward pass, where memory use is highest. With `fused`, all sums of one dtype and device with the
    same destination share a bucket. Otherwise each layer has a bucket; on an accelerator each group, whose averages are
    updated by a few calls for all layers.

    Attributes:
        skip_step: Device bool: the optimizer or the ``GradScaler`` skips this step on all ranks. None: neither does.
        broadcast: The layers with uses that were left out on this rank, as their inputs are broadcast over the samples.
        basis_version: The `BlockGroup.basis_version` at the beginning of this step, by the ``id`` of the group.
    """

    def __init__(self, groups: Sequence[BlockGroup], *, fused: bool) -> None:
        """Compute the layout of the buckets, without groups whose sums this rank neither adds to nor receives."""
        self._groups = [group for group in groups if group.role.accumulates or group.role.keeps_averages]
        self._fused = fused
        self.skip_step: Tensor | None = None
        self._members = {member.layer.name: (group, member) for group in self._groups for member in group.members}
        self.sample_counts = {name: SampleCount() for name in self._members}
        self._filled: set[str] = set()  # the layers whose sums are initialised
        self.broadcast: set[str] = set()
        self.note_basis_versions()
        self._choose(frozenset(SIDES))

    def choose(self, sides: frozenset[Side]) -> None:
        """Set the sides whose statistics are collected, before any are added."""
        if sides != self.sides:
            self._choose(sides)

    def _choose(self, sides: frozenset[Side]) -> None:
        self.sides = sides
        found = {name: of_sides(group, sides) for name, (group, _) in self._members.items()}
        self._specs = {name: specs for name, specs in found.items() if specs}
        self._buckets = self._make_buckets(self._specs)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}

    def _make_buckets(self, specs: Mapping[str, list[Statistic]]) -> list[Bucket]:
        """Return the buckets for the statistics of each layer."""
        buckets: dict[object, list[tuple[BlockGroup, LayerBlocks, list[Statistic]]]] = {}
        for name, statistics in specs.items():
            group, member = self._members[name]
            if self._fused:
                assignment = group.role.assignment
                destination = None if assignment.keeps_everywhere else assignment.workers
                key: object = (group.dtype, group.device, assignment.sums, destination, self._chunk(name))
            else:
                key = id(group)
            buckets.setdefault(key, []).append((group, member, statistics))
        return [Bucket(layers) for layers in buckets.values()]

    def _chunk(self, layer: str) -> int:
        """Return the number of the chunk of gradients with which the sums of a layer are sent."""
        return 0

    def collects(self, layer: str) -> bool:
        """Return whether any statistics of a layer are collected."""
        return layer in self._specs

    @property
    def empty(self) -> bool:
        """Whether nothing was added since the last step."""
        return not any(count.rows for count in self.sample_counts.values())

    def of(self, layer: str) -> dict[str, Tensor]:
        """Return the sums of a layer ``[n, *packed_shape(spec)]``, uninitialised if nothing was added."""
        bucket = self._bucket_of[layer]
        bucket.allocate()
        return bucket.views[layer]

    def add(self, layer: str, accumulate: Callable[[Mapping[str, Tensor]], None]) -> None:
        """Add the statistics of one use of a layer. Its samples are counted separately.

        `accumulate` adds to unpacked sums ``[n, *shape]``. Symmetric matrices are packed at once, to save memory.
        """
        views, specs, (_, member) = self.of(layer), self._specs[layer], self._members[layer]
        like = next(iter(views.values()))
        shapes = {spec.name: (member.stop - member.start, *spec.shape) for spec in specs}
        whole = Sums({name: like.new_zeros(shape) for name, shape in shapes.items()})
        accumulate(whole)
        found = {name: tuple(tensor.shape) for name, tensor in whole.items()}
        if found != shapes:
            raise NatgradError(
                f"accumulate() of {layer} has left the sums {found} in place of {shapes}", "your-own-code"
            )
        for spec in specs:
            if layer in self._filled:
                views[spec.name].add_(pack(whole.pop(spec.name), spec))
            else:
                pack(whole.pop(spec.name), spec, views[spec.name])
        self._filled.add(layer)

    def close(self, shares: Shares, gain: float | Tensor) -> None:
        """Complete the buckets for sending: zeros for unused layers, gradients of per-sample losses, and counters.

        `gain` makes captured gradients those of per-sample losses.
        """
        for bucket in self._buckets:
            bucket.close(self.sample_counts, shares, gain)

    def reduce(self, runtime: Communicator, wire: torch.dtype | None) -> None:
        """Sum the closed buckets over the ranks in place, sent in the dtype `wire` if it is narrower.

        Those that are summed later are left as they are.
        """
        for work in post_sums(self._buckets, runtime, wire, runtime.group):
            work.wait()

    def post(self, runtime: Communicator, wire: torch.dtype | None) -> None:
        """Start `reduce` in a separate queue, which requires that all ranks receive all sums."""
        for bucket in self._buckets:
            bucket.post(runtime, wire, runtime.background, finishes_alone=True)

    def wait(self) -> None:
        """Wait for the sums in progress."""
        for bucket in self._buckets:
            bucket.wait()

    def split_off(self) -> StatisticsBuffer:
        """Move the sums in progress to a new buffer, and return that."""
        moved = copy(self)
        moved._buckets = [bucket.split_off() for bucket in self._buckets]
        return moved

    def arrived(self) -> Iterator[BlockSums]:
        """Yield the sums that this rank keeps, and free each bucket after it has been read."""
        for bucket in self._buckets:
            bucket.wait()
            if bucket.role.keeps_averages:
                yield from bucket.arrived()
            bucket.release()

    def note_basis_versions(self) -> None:
        """Record the basis versions at the beginning of a step; called at the same time on all ranks."""
        self.basis_version = {id(group): list(group.state.basis_version) for group in self._groups}

    def reset(self) -> None:
        """Begin the next step."""
        if self._filled:
            self.sample_counts = {name: SampleCount() for name in self._members}
            self._filled.clear()
        self.skip_step = None
        for bucket in self._buckets:
            bucket.release()

    def abandon(self) -> None:
        """Drop the sums in progress; collective."""


def post_sums(
    buckets: Iterable[Bucket], runtime: Communicator, wire: torch.dtype | None, group: ProcessGroup | None
) -> list[Work]:
    """Start to sum buckets over all ranks, in place: on all of them, or on the one worker of each."""
    works: list[Work] = []
    to_workers: dict[object, list[Bucket]] = {}
    places: Counter[object] = Counter()  # each message has at most one bucket of each worker
    for bucket in buckets:
        if bucket.role.assignment.sums == "all":
            works += bucket.post(runtime, wire, group)
        elif bucket.role.assignment.sums == "worker" and runtime.ranks > 1:
            kind = bucket.allocate().dtype, bucket.allocate().device
            places[kind, bucket.role.server] += 1
            to_workers.setdefault((kind, places[kind, bucket.role.server]), []).append(bucket)
    for some in to_workers.values():
        nothing = some[0].allocate()[:0]
        parts = {bucket.role.server: bucket.messages(wire) for bucket in some}
        for index, (_, sent) in enumerate(some[0].messages(wire)):
            vectors = [parts[rank][index][0] if rank in parts else nothing for rank in range(runtime.ranks)]
            work = runtime.post_to_owners(vectors, "factors", sent, group)
            works.append(work.then(vectors[runtime.rank].copy_))
    return works


class RowBuffer:
    """The pooled rows of layers, of all backward passes since the last step."""

    def __init__(self, groups: Iterable[BlockGroup], wire: torch.dtype | None) -> None:
        """Start without rows.

        Rows that are sent in bfloat16 are also stored in it. In float16 small numbers need the scale of a message.
        """
        self._groups = {member.layer.name: group for group in groups for member in group.members}
        self._narrow = wire if wire == torch.bfloat16 else None
        self.wanted = True
        self.reset()

    def reset(self) -> None:
        """Begin the next step."""
        self._rows: dict[str, list[tuple[Tensor, Tensor, float]]] = {}
        self.sample_counts = {name: SampleCount() for name in self._groups}

    def add(self, layer: str, inputs: Tensor, gradients: Tensor, scale: float) -> None:
        """Store the rows a ``[n, B, i]``, which may not change later, and copies of g ``[n, B, o]`` of a backward pass.

        `scale` makes the gradients those of per-sample losses.
        """
        dtype = self._narrow or self._groups[layer].dtype
        rows = inputs.to(dtype), gradients.to(dtype, copy=True), scale
        self._rows.setdefault(layer, []).append(rows)

    def count(self, layer: str) -> int:
        """Return the number of rows of a layer."""
        return sum(inputs.shape[1] for inputs, _, _ in self._rows.get(layer, ()))

    def take(self, layer: str, gain: float | Tensor) -> tuple[Tensor, Tensor]:
        """Remove and return the rows of a layer, ``[n, m, i]`` and ``[n, m, o]``, in at least float32.

        Do not change them: they may be the layer's inputs. `gain` is a further factor that makes gradients those of
        per-sample losses.
        """
        dtype, rows = at_least_float32(self._groups[layer].work_dtype), self._rows.pop(layer)
        inputs = [inputs.to(dtype) for inputs, _, _ in rows]
        gradients = [gradients.to(dtype) * (scale * gain) for _, gradients, scale in rows]
        if len(rows) == 1:
            return inputs[0], gradients[0]  # not copied
        return torch.cat(inputs, 1), torch.cat(gradients, 1)
