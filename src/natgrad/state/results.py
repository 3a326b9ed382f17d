"""The results of tasks, among them gathered rows: allocated, read, resized and recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from natgrad.specs import ROWS, Task, TensorSpec
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.tensors import StateTensors


def allocate_results(group: BlockGroup) -> StateTensors:
    """Allocate the results of tasks unless they exist, and return them."""
    if not group.state.results:
        group.state.results = draft(group, group.size, group.state.rows)
    return group.state.results


def draft(group: BlockGroup, size: int, rows: int) -> StateTensors:
    """Return zeros for the results of so many blocks, with this number of rows."""
    return StateTensors(written(group, rows), size, group.solve_dtype, group.device)


def read_results(
    group: BlockGroup, names: Iterable[str], blocks: slice | Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return some results for some blocks, in `dtype` unless the curvature accepts narrow ones."""
    results = {name: group.state.results.read(name, blocks) for name in names}
    return results if group.curvature.takes_narrow else {name: result.to(dtype) for name, result in results.items()}


def read_for_capture(group: BlockGroup, member: LayerBlocks) -> dict[str, Tensor] | None:
    """Return the results that are read when a layer's statistics are accumulated; None: they are incomplete."""
    if not group.state.ready[group.members.index(member)]:
        return None
    return read_results(group, group.computed_for_capture, member.blocks, group.dtype)


def previous(group: BlockGroup, task: Task, blocks: slice) -> dict[str, Tensor] | None:
    """Return the last results of a task for some blocks; None: it does not need them, or some are missing."""
    if not (task.needs_previous and all(group.state.good[task.name][blocks])):
        return None
    return {spec.name: group.state.results.read(spec.name, blocks).to(group.work_dtype) for spec in task.writes}


def record_results(
    group: BlockGroup, part: str, blocks: list[int], success: list[bool], *, forget: bool = False
) -> None:
    """Record for which of some `blocks` the decompositions of a task succeeded.

    After a failure the last good result stays in use. With `forget` (for a loaded state), earlier results are ignored.
    """
    state = group.state
    good = state.good[part]
    for block, fine in zip(blocks, success, strict=True):
        good[block] = fine or (good[block] and not forget)
    if not forget:
        state.failures.record_results(part, blocks, success)
    state.ready[:] = [all(all(good[member.blocks]) for good in state.good.values()) for member in group.members]


# --- Gathered rows --------------------------------------------------------------------------------------------------


def _specs(group: BlockGroup) -> list[TensorSpec]:
    """Return the specs of the results: gathered rows with their number of samples and damping, and what tasks write.

    The statistic Y of rows (source "both") is read by tasks alone, and is not kept.
    """
    rows = [spec for spec in group.gathered if spec.source != "both"]
    numbers = (TensorSpec("samples", ()), TensorSpec("damping", ())) if group.gathered else ()
    return [*rows, *(spec for task in group.tasks for spec in task.writes), *numbers]


def written(group: BlockGroup, rows: int) -> list[TensorSpec]:
    """Return the specs of the results for this number of rows."""
    return [spec.sized(rows) for spec in _specs(group)]


def sized_by_batch(group: BlockGroup) -> dict[str, TensorSpec]:
    """Return the specs of the results whose size depends on the batch, by name."""
    return {spec.name: spec for spec in _specs(group) if spec.sized_by_batch}


def rows_of(group: BlockGroup, state: Mapping[str, Tensor]) -> int:
    """Return the number of rows in the saved state of a layer."""
    first = state.get(group.gathered[0].name) if group.gathered else None
    return first.shape[1] if isinstance(first, Tensor) and first.ndim == 3 else 0


def padded(group: BlockGroup, name: str, values: Tensor) -> Tensor:
    """Return values ``[n, ...]`` of a result, padded with zeros to the number of rows of the group."""
    spec = sized_by_batch(group).get(name)
    if spec is None:
        return values
    missing = group.state.rows - values.shape[1]
    padding = [(0, missing if size == ROWS else 0) for size in reversed(spec.shape)]
    return pad(values, [number for pair in padding for number in pair])


def resize(group: BlockGroup, rows: int) -> None:
    """Change the number of rows of the results, by cutting or padding with zeros."""
    state = group.state
    if rows == state.rows:
        return
    before, kept, whole = state.results, min(rows, state.rows), slice(None)
    state.rows, state.results = rows, StateTensors()
    if not before:
        return
    fresh = allocate_results(group)
    for spec in _specs(group):
        index = whole, *(slice(kept) if size == ROWS else whole for size in spec.shape)
        fresh.write(spec.name, whole, padded(group, spec.name, before.read(spec.name, whole)[index]))
