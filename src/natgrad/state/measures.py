"""The measures of refresh rules: numbers computed from running averages, for each layer or each of its factors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.curvature import Curvature
from natgrad.curvature.base import gathered
from natgrad.linalg.products import full_products
from natgrad.refresh.rule import By, Measure
from natgrad.specs import Statistic
from natgrad.state.block_group import BlockGroup
from natgrad.state.tensors import diagonals


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
    """Return the units of each layer: one, or by "factor" one for each set of tasks with common statistics."""
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
    """Return whether a measure is available for a curvature; gathered statistics have no running averages."""
    needed = {"trace": curvature.trace_reads is not None, "basis": curvature.off_diagonal_reads}
    return not gathered(statistics) and bool(needed.get(measure or "nothing", True))


def measured(group: BlockGroup, measure: Measure, by: By = "layer") -> Tensor:
    """Return a measure of the running averages for each unit of each layer ``[U, M]``; nan if not available.

    Requires averages; "basis" also requires results of tasks, and "drift" `BlockGroup.decisions`. The trace does not
    include damping.
    """
    group_units = units(group, by)
    return torch.stack([_MEASURES[measure](group, member.blocks, group_units) for member in group.members], 1)


def _trace(group: BlockGroup, blocks: slice, layer_units: Sequence[Unit]) -> Tensor:
    """Return ``tr F`` of a layer ``[1]``."""
    averages = group.corrected(blocks, group.curvature.trace_reads or ())
    return group.curvature.trace(averages, group.outputs).sum(0, keepdim=True)


def _norm(group: BlockGroup, blocks: slice, layer_units: Sequence[Unit]) -> Tensor:
    """Return ``Π ‖X‖`` over the statistics X that tasks read ``[1]``."""
    squares = _squares(group, group.snapshot(blocks, read_by_tasks(group)))
    return torch.stack([square.sqrt() for square in squares.values()]).prod(0, keepdim=True)


def _drift(group: BlockGroup, blocks: slice, layer_units: Sequence[Unit]) -> Tensor:
    """Return the largest ``‖X - X_last‖ / ‖X_last‖`` of the statistics X that the tasks of each unit read ``[U]``."""
    assert group.decisions is not None
    last_averages = group.decisions.last_averages
    if not last_averages:
        return torch.full((len(layer_units),), torch.inf, dtype=group.work_dtype, device=group.device)
    now = group.snapshot(blocks, read_by_tasks(group))
    last = {name: last_averages.read(name, blocks) for name in now}
    moved, whole = _squares(group, {name: now[name] - last[name] for name in now}), _squares(group, last)
    return _largest(layer_units, {name: (moved[name] / whole[name]).sqrt() for name in now})


def _basis(group: BlockGroup, blocks: slice, layer_units: Sequence[Unit]) -> Tensor:
    """Return the largest ``‖offdiag(Qᵀ X Q)‖ / ‖X‖`` of the factors X of each unit with eigenvectors Q ``[U]``."""
    names = group.curvature.off_diagonal_reads or ()
    with full_products(group.device):
        results = {name: group.results.read(name, blocks).to(group.work_dtype) for name in group.results}
        pairs = group.curvature.off_diagonal(group.corrected(blocks, names), results)
    # A factor computed from several statistics has the name of one of them, because all are in one unit.
    return _largest(
        layer_units, {name: (off.sum() / whole.sum()).sqrt() for name, (off, whole) in zip(names, pairs, strict=False)}
    )


_MEASURES: Mapping[Measure, Callable[[BlockGroup, slice, Sequence[Unit]], Tensor]] = {
    "trace": _trace,
    "norm": _norm,
    "drift": _drift,
    "basis": _basis,
}


def _largest(layer_units: Sequence[Unit], found: Mapping[str, Tensor]) -> Tensor:
    """Return the largest value among the statistics of each unit ``[U]``; nan if there is none."""
    nan = torch.full_like(next(iter(found.values())), torch.nan)
    values = [[found[name] for name in found if name in unit.statistics] for unit in layer_units]
    return torch.stack([torch.stack(unit_values).amax(0) if unit_values else nan for unit_values in values])


def _squares(group: BlockGroup, packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the squared Frobenius norm of each statistic; off-diagonal elements of a triangle count twice."""
    squares = {}
    for spec in group.statistics:
        if spec.name in packed:
            square = packed[spec.name].square().sum()
            if spec.symmetric:
                square = 2 * square - diagonals(packed[spec.name], spec).square().sum()
            squares[spec.name] = square
    return squares
