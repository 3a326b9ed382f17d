"""The decisions of a refresh rule on the layers of a group, and what the next measurement is compared with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf, isfinite, nan, prod
from typing import TypeAlias

import torch
from torch import Tensor

from natgrad.curvature import Curvature
from natgrad.curvature.base import gathered, input_statistics, statistics_of
from natgrad.errors import require
from natgrad.layers import Layer
from natgrad.refresh import RefreshRule
from natgrad.refresh.rule import Measure
from natgrad.specs import Statistic
from natgrad.state.averages import corrected, snapshot
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.tensors import StateTensors, diagonals, packed_shape, spec_dtype

# The last decision on a layer, as a number for messages and checkpoints. 0: none.
REFRESHED, KEPT = 1.0, 2.0

# The names of this state in the checkpoint of a layer.
_NUMBERS, _PREFIX = "rule", "last "
# The numbers (trace, decision) of a layer without a decision, and of one whose decomposition has not succeeded yet.
_NOTHING, _AGAIN = (nan, 0.0), (nan, REFRESHED)


def check_use(rule: RefreshRule, covered: Collection[tuple[Layer, Curvature]]) -> None:
    """Raise a ``ValueError`` unless a rule applies to at least one layer."""
    if rule.separate:
        fits = "one for both sides: it has nothing that is of the inputs alone"
        usable = any(input_statistics(curvature, statistics_of(curvature, layer)) for layer, curvature in covered)
        require(usable or not covered, "refresh", rule, fits)
    if rule.measure is not None:
        fits = f"one whose rule can measure some layer: none has a {rule.measure} here"
        usable = any(is_measurable(own, statistics_of(own, layer), rule.measure) for layer, own in covered)
        require(usable or not covered, "refresh", rule, fits)


def is_measurable(curvature: Curvature, statistics: Collection[Statistic], measure: Measure) -> bool:
    """Return whether a measure is available for a curvature; gathered statistics have no running averages."""
    return not gathered(statistics) and (measure != "trace" or curvature.trace_reads is not None)


class DecisionState:
    """The last decision on each of the M layers of a group, and the reference of the next measurement.

    Attributes:
        numbers: For each layer the trace at the last decision (nan: none) and the decision ``[M, 2]``; on the host.
        last_averages: The averages of the last refresh, packed. Empty unless the rule measures drift.
    """

    def __init__(self, group: BlockGroup, measure: Measure) -> None:
        self._group, self._measure = group, measure
        self.numbers = torch.tensor([_NOTHING] * len(group.members), dtype=torch.float64, device="cpu")
        self.last_averages = StateTensors()

    @property
    def _compared(self) -> list[Statistic]:
        """The statistics that tasks read, if this rank keeps their averages for comparison."""
        if self._measure != "drift" or not self._group.role.is_gradient_worker:
            return []
        read = {name for task in self._group.tasks for name in task.reads}
        return [spec for spec in self._group.statistics if spec.name in read]

    def keeps(self, layer: Layer) -> bool:
        """Return whether the last decision on a layer was to keep its results."""
        index = next(index for index, member in enumerate(self._group.members) if member.layer is layer)
        return float(self.numbers[index, 1]) == KEPT

    @property
    def bytes_per_block(self) -> int:
        """The bytes of `last_averages` for one block."""
        dtype = self._group.work_dtype
        return sum(prod(packed_shape(spec)) * spec_dtype(spec, dtype).itemsize for spec in self._compared)

    # --- Measuring -------------------------------------------------------------------------------------------------

    def needs_refresh(self, index: int) -> bool:
        """Return whether a layer has no usable result: it was never refreshed, or its result is unusable. Waits."""
        state, blocks = self._group.state, self._group.members[index].blocks
        unusable = state.failures.unusable
        return not state.ready[index] or (unusable is not None and bool(unusable[blocks].any()))

    def measure(self, damping: float) -> list[float]:
        """Return the trace or the drift of each layer; nan if not available. Waits for the device."""
        group = self._group
        if group.state.weight is None or not is_measurable(group.curvature, group.statistics, self._measure):
            return [nan] * len(group.members)
        if self._measure == "drift":
            values = [self._drift(member.blocks).double() for member in group.members]
        else:
            values = [self._trace(member.blocks, damping) for member in group.members]
        numbers: list[float] = torch.stack(values).tolist()
        return numbers

    def _trace(self, blocks: slice, damping: float) -> Tensor:
        """Return ``tr F`` of a layer, with the damping."""
        group = self._group
        trace = group.curvature.trace(corrected(group, blocks, group.curvature.trace_reads or ()), group.outputs)
        return trace.sum(0).double() + damping * group.factor * len(trace) * group.outputs * group.inputs

    def _drift(self, blocks: slice) -> Tensor:
        """Return the largest ``‖X - X_last‖ / ‖X_last‖`` of the statistics X that the tasks of a layer read."""
        group = self._group
        if not self.last_averages:
            return torch.full((), inf, dtype=group.work_dtype, device=group.device)
        now = snapshot(group, blocks, self.last_averages)
        last = {name: self.last_averages.read(name, blocks) for name in now}
        moved, whole = _squares(group, {name: now[name] - last[name] for name in now}), _squares(group, last)
        return torch.stack([(moved[name] / whole[name]).sqrt() for name in now]).amax(0)

    def change(self, index: int, value: float) -> float:
        """Return by how much a layer with this measured value has changed; infinite if unknown."""
        if self._measure == "drift":
            return value if isfinite(value) else inf
        last = float(self.numbers[index, 0])
        if last == 0 or not (isfinite(value) and isfinite(last)):
            return inf
        return abs(value - last) / abs(last)

    # --- Refreshes -------------------------------------------------------------------------------------------------

    def record(self, index: int, value: float, *, refreshed: bool) -> None:
        """Record a decision on a layer with this measured value; if it is `refreshed`, from the present averages."""
        if self._measure == "trace" and isfinite(value):
            self.numbers[index, 0] = value
        self.numbers[index, 1] = REFRESHED if refreshed else KEPT
        if refreshed:
            names = tuple(spec.name for spec in self._compared)
            for name, average in snapshot(self._group, self._group.members[index].blocks, names).items():
                self._allocate().write(name, self._group.members[index].blocks, average)

    def end_refresh(self, index: int, *, failed: bool) -> None:
        """Record the end of a refresh. If it `failed`, it is repeated at the next decision."""
        if failed:
            self._forget(index, _AGAIN)

    def _forget(self, index: int, numbers: tuple[float, float]) -> None:
        """Drop the reference of the next measurement, so that the layer counts as changed."""
        self.numbers[index] = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        for name in self.last_averages:
            self.last_averages[name][self._group.members[index].blocks] = 0

    def to(self, dtype: torch.dtype, device: torch.device) -> None:
        """Move all tensors."""
        if self.last_averages:
            self.last_averages = self.last_averages.to(dtype, device)

    def _allocate(self) -> StateTensors:
        if not self.last_averages:
            group = self._group
            self.last_averages = StateTensors(self._compared, group.size, group.work_dtype, group.device, pack=True)
        return self.last_averages

    # --- Checkpoints ----------------------------------------------------------------------------------------------

    def state(self, member: LayerBlocks) -> dict[str, Tensor]:
        """Return the state of a layer by the names of its tensors in a checkpoint."""
        n, index = member.stop - member.start, self._group.members.index(member)
        averages = self._allocate()
        tensors = {f"{_PREFIX}{name}": averages.whole(name, member.blocks) for name in averages}
        numbers = self.numbers[index]
        # Earlier versions saved a third number.
        return {_NUMBERS: torch.cat([numbers, numbers.new_full((1,), nan)]).expand(n, -1), **tensors}

    def shapes(self, member: LayerBlocks) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of `state`."""
        n = member.stop - member.start
        return {_NUMBERS: (n, 3), **{f"{_PREFIX}{spec.name}": (n, *spec.shape) for spec in self._compared}}

    def restore(self, member: LayerBlocks, given: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned. Start again if the checkpoint was written without this rule."""
        index = self._group.members.index(member)
        if not all(name in given for name in self.shapes(member)):
            self._forget(index, _NOTHING)
            return
        # Layers that earlier versions had stopped count as kept.
        self.numbers[index] = given[_NUMBERS][0, :2].to(self.numbers)
        self.numbers[index, 1].clamp_(max=KEPT)
        averages = self._allocate()
        for name in averages:
            averages.write_whole(name, member.blocks, given[f"{_PREFIX}{name}"].to(self._group.device))


Decisions: TypeAlias = Mapping[BlockGroup, DecisionState]
"""The decisions on the groups that a refresh rule measures."""


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
