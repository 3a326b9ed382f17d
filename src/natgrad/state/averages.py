"""Running averages of statistics, their bias corrections, and the state of the curvature: allocated and read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from natgrad.linalg import tensor_on
from natgrad.specs import Statistic, Task
from natgrad.state.block_group import BlockGroup
from natgrad.state.tensors import StateTensors, along, diagonals, unpack


def allocate_averages(group: BlockGroup) -> Tensor:
    """Allocate the running averages unless they exist, and return the bias corrections."""
    state = group.state
    if state.weight is None:
        state.weight = torch.zeros(group.size, dtype=group.dtype, device=group.device)
        state.input_weight = state.weight.clone() if group.inputs_apart else None
        state.averages = StateTensors(group.statistics, group.size, group.factor_dtype, group.device, pack=True)
    return state.weight


def bias_corrections(group: BlockGroup) -> list[Tensor]:
    """Return all bias corrections."""
    return [weight for weight in (group.state.weight, group.state.input_weight) if weight is not None]


def weight_of(group: BlockGroup, statistic: str) -> Tensor | None:
    """Return the bias correction of a statistic ``[N]``; None: there are no running averages."""
    state = group.state
    return state.weight if state.input_weight is None or statistic not in group.input_statistics else state.input_weight


def snapshot(
    group: BlockGroup, blocks: slice | Tensor, names: Collection[str], diagonal: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return copies of the bias-corrected running averages of some blocks, packed, in `BlockGroup.work_dtype`.

    For statistics in `diagonal`, only diagonals are returned.
    """
    result = {}
    for spec in group.statistics:
        if spec.name in names:
            average, weight = group.state.averages.read(spec.name, blocks), weight_of(group, spec.name)
            assert weight is not None
            average = diagonals(average, spec) if spec.name in diagonal else average
            result[spec.name] = torch.div(average, along(weight[blocks], average.ndim - 1)).to(group.work_dtype)
    return result


def unpacked(
    averages: Mapping[str, Tensor], statistics: Sequence[Statistic], diagonal: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the averages of `snapshot` unpacked, except those in `diagonal`."""
    specs = {spec.name: spec for spec in statistics if spec.name in averages}
    return {name: averages[name] if name in diagonal else unpack(averages[name], spec) for name, spec in specs.items()}


def corrected(
    group: BlockGroup, blocks: slice | Tensor, names: Collection[str], diagonal: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the bias-corrected running averages of some blocks, unpacked."""
    return unpacked(snapshot(group, blocks, names, diagonal), group.statistics, diagonal)


def live_averages(group: BlockGroup, blocks: slice | Tensor) -> dict[str, Tensor]:
    """Return the running averages of some blocks that preconditioning reads."""
    names = [spec.name for spec in group.statistics if spec.used_by_precondition]
    return corrected(group, blocks, names) if names else {}


def restart(group: BlockGroup, task: Task, blocks: list[int]) -> None:
    """Restart the averages in `Task.restarts` of `blocks` whose task has succeeded."""
    if not task.restarts:
        return
    for block in blocks:
        group.state.basis_version[block] += 1
    for name in task.restarts if group.state.averages else ():
        group.state.averages[name][blocks] = 0


def restarted_since(group: BlockGroup, versions: Sequence[int], blocks: slice) -> Tensor | None:
    """Return which of some blocks were restarted since `versions`, of all blocks, as bool ``[n]``; None: none."""
    pairs = zip(versions[blocks], group.state.basis_version[blocks], strict=True)
    changed = [before != now for before, now in pairs]
    return tensor_on(group.device, changed) if any(changed) else None


def allocate_memory(group: BlockGroup) -> StateTensors:
    """Allocate the curvature's state unless it exists, and return it."""
    if not group.state.memory:
        group.state.memory = StateTensors(group.memory_specs, group.size, group.solve_dtype, group.device)
    return group.state.memory
