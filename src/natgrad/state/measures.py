"""The measures of refresh rules: numbers computed from running averages, for each layer or each of its factors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from natgrad.curvature import Curvature
from natgrad.curvature.base import gathered
from natgrad.linalg import triangle
from natgrad.linalg.products import full_products
from natgrad.refresh.rule import By, Measure
from natgrad.specs import Statistic
from natgrad.state.block_group import BlockGroup

# The number of elements that are read at a time, about.
_CHUNK = 2**22


@dataclass(frozen=True)
class Unit:
    """The part of a layer for which one decision is made.

    Attributes:
        parts: The names of its tasks (`natgrad.Task`).
        statistics: The statistics that they read.
    """

    parts: frozenset[str]
    statistics: frozenset[str]


def read_by_tasks(group: BlockGroup) -> tuple[str, ...]:
    """Return the names of the statistics that tasks read."""
    read = {name for task in group.tasks for name in task.reads}
    return tuple(spec.name for spec in group.statistics if spec.name in read)


def units(group: BlockGroup, by: By) -> list[Unit]:
    """Return the units of the layers of a group: one, or by "factor" one for all tasks that read common statistics."""
    found: list[Unit] = []
    for task in group.tasks:
        unit, others = Unit(frozenset({task.name}), frozenset(task.reads)), []
        for other in found:
            if by == "factor" and unit.statistics.isdisjoint(other.statistics):
                others.append(other)
            else:
                unit = Unit(other.parts | unit.parts, other.statistics | unit.statistics)
        found = [*others, unit]
    return found


def measurable(curvature: Curvature, statistics: Collection[Statistic], measure: Measure | None) -> bool:
    """Return whether a measure is available for a curvature of such statistics: gathered ones have no averages."""
    needed = {"trace": curvature.trace_reads is not None, "basis": curvature.off_diagonal_reads}
    return not gathered(statistics) and bool(needed.get(measure or "nothing", True))


def measured(group: BlockGroup, measure: Measure, by: By = "layer") -> Tensor:
    """Return a measure of the running averages for each unit of each layer ``[U, M]``; nan where not available.

    The group has averages; "basis" also needs results of tasks, "drift" `BlockGroup.decisions`. A trace is without
    damping.
    """
    return _MEASURES[measure](group, units(group, by))


def _trace(group: BlockGroup, stack_units: Sequence[Unit]) -> Tensor:
    """Return ``tr F`` of each layer."""
    curvature, names = group.curvature, group.curvature.trace_reads or ()
    traces = [curvature.trace(group.corrected(blocks, names), group.outputs) for blocks in _pieces(group, names)]
    return _by_layer(group, torch.cat(traces))[None]


def _norm(group: BlockGroup, stack_units: Sequence[Unit]) -> Tensor:
    """Return ``Π ‖X‖`` over the statistics X that tasks read."""
    squares = _squares_of(group, group.snapshot)
    return torch.stack([square.sqrt() for square in squares.values()]).prod(0)[None]


def _drift(group: BlockGroup, stack_units: Sequence[Unit]) -> Tensor:
    """Return the largest ``‖X - X_last‖ / ‖X_last‖`` of the statistics X that tasks read."""
    assert group.decisions is not None
    last_averages = group.decisions.last_averages

    def last(blocks: slice, names: tuple[str, ...]) -> dict[str, Tensor]:
        return {name: last_averages.read(name, blocks) for name in names}

    def moved(blocks: slice, names: tuple[str, ...]) -> dict[str, Tensor]:
        now, before = group.snapshot(blocks, names), last(blocks, names)
        return {name: now[name] - before[name] for name in names}

    if not last_averages:
        shape = len(stack_units), len(group.members)
        return torch.full(shape, torch.inf, dtype=group.work_dtype, device=group.device)
    differences, lasts = _squares_of(group, moved), _squares_of(group, last)
    return _largest(stack_units, [(name, (differences[name] / lasts[name]).sqrt()) for name in lasts])


def _basis(group: BlockGroup, stack_units: Sequence[Unit]) -> Tensor:
    """Return the largest ``‖offdiag(Qᵀ X Q)‖ / ‖X‖`` of the factors X with eigenvectors Q."""
    curvature, names, found = group.curvature, group.curvature.off_diagonal_reads or (), []
    with full_products(group.device):
        for blocks in _pieces(group, names):
            held = {name: group.results.read(name, blocks).to(group.work_dtype) for name in group.results}
            pairs = curvature.off_diagonal(group.corrected(blocks, names), held)
            found.append(torch.stack([torch.stack(pair) for pair in pairs]))  # [factors, 2, n]
    off, whole = torch.cat(found, -1).unbind(1)
    shares = [_by_layer(group, left_out) / _by_layer(group, all_) for left_out, all_ in zip(off, whole, strict=True)]
    # A factor made of several statistics is named by any of them: all are in one unit.
    return _largest(stack_units, [(name, share.sqrt()) for name, share in zip(names, shares, strict=False)])


_MEASURES: Mapping[Measure, Callable[[BlockGroup, Sequence[Unit]], Tensor]] = {
    "trace": _trace,
    "norm": _norm,
    "drift": _drift,
    "basis": _basis,
}


def _largest(stack_units: Sequence[Unit], found: Sequence[tuple[str, Tensor]]) -> Tensor:
    """Return the largest value among the statistics of each unit ``[U, M]``; nan where there is none."""
    rows = []
    for unit in stack_units:
        values = [numbers for name, numbers in found if name in unit.statistics]
        rows.append(torch.stack(values).amax(0) if values else torch.full_like(found[0][1], torch.nan))
    return torch.stack(rows)


def _squares_of(group: BlockGroup, read: Callable[[slice, tuple[str, ...]], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the squared Frobenius norm of each statistic over the blocks of each layer ``[M]``."""
    names = read_by_tasks(group)
    pieces: dict[str, list[Tensor]] = {name: [] for name in names}
    for blocks in _pieces(group, names):
        tensors = read(blocks, names)
        for spec in group.statistics:
            if spec.name in pieces:
                pieces[spec.name].append(_squares(spec, tensors[spec.name]))
    return {name: _by_layer(group, torch.cat(squares)) for name, squares in pieces.items()}


def _squares(spec: Statistic, packed: Tensor) -> Tensor:
    """Return ``‖X‖²`` of each block ``[n]``; elements off the diagonal of a triangle count twice."""
    squares = packed.reshape(len(packed), -1).square().sum(1)
    if not spec.symmetric:
        return squares
    diagonals = triangle.diagonals(packed.reshape(-1, packed.shape[-1]), spec.shape[-1])
    return 2 * squares - diagonals.reshape(len(packed), -1).square().sum(1)


def _by_layer(group: BlockGroup, values: Tensor) -> Tensor:
    """Return the sum of ``[N]`` over the blocks of each layer ``[M]``."""
    return torch.stack([values[member.blocks].sum() for member in group.members])


def _pieces(group: BlockGroup, names: tuple[str, ...]) -> Iterator[slice]:
    """Yield the blocks to read at a time."""
    numel = sum(prod(spec.shape) for spec in group.statistics if spec.name in names)
    step = max(1, _CHUNK // max(1, numel))
    for start in range(0, group.size, step):
        yield slice(start, min(start + step, group.size))
