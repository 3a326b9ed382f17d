"""The decisions of a refresh rule on each layer: measured numbers, verdicts and the state of the rule."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan, prod
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from natgrad.curvature import Curvature
from natgrad.curvature.base import input_statistics, statistics_of
from natgrad.distributed import Plan
from natgrad.errors import require
from natgrad.refresh import Candidate, RefreshRule
from natgrad.refresh.rule import By, Measure, Verdict
from natgrad.specs import Statistic
from natgrad.state.block_group import BlockGroup, LayerBlocks
from natgrad.state.measures import Unit, measurable, measured, read_by_tasks, units
from natgrad.state.tensors import StateTensors, packed_shape, spec_dtype

if TYPE_CHECKING:
    from natgrad.layers import Layer

# The last decision on a layer, as a number for messages and checkpoints. 0: none.
REFRESHED, KEPT, STOPPED, WAITING = 1.0, 2.0, 3.0, 4.0
_WORDS = {KEPT: "kept", STOPPED: "stopped", WAITING: "waiting"}

# The names of this state in the checkpoint of a layer.
_NUMBERS, _PREFIX = "rule", "last "
# The numbers (remembered, decision, measured without damping) of a layer without a decision, and of one whose
# decomposition has not succeeded yet.
_NOTHING, _AGAIN = (nan, 0.0, nan), (nan, REFRESHED, nan)


def check_use(rule: RefreshRule, covered: Collection[tuple[Layer, Curvature]]) -> None:
    """Check that a rule applies to at least one layer.

    Raises:
        ValueError: if it applies to none, naming the rule.
    """
    if rule.separate:
        fits = "one for both sides: it has nothing that is of the inputs alone"
        usable = any(input_statistics(curvature, statistics_of(curvature, layer)) for layer, curvature in covered)
        require(usable or not covered, "refresh", rule, fits)
    if rule.criterion is not None:
        measure = rule.criterion.measure
        fits = f"one whose rule can measure some layer: none has a {measure} here"
        usable = any(measurable(own, statistics_of(own, layer), measure) for layer, own in covered)
        require(usable or not covered, "refresh", rule, fits)


# --- Decisions ------------------------------------------------------------------------------------------------------


@dataclass
class LayerDecision:
    """The decision on one layer.

    Attributes:
        group: The group of the layer.
        state: The decisions on the layers of the group.
        index: The index of the layer in the group.
        units: The sets of parts that are decided on separately.
        values: The measured value of each unit.
        undamped: The measured value of the whole layer without damping.
        parts: The names of the parts to refresh.
        change: The largest change of the units.
        outcome: The decision.
    """

    group: BlockGroup
    state: DecisionState
    index: int
    units: Sequence[Unit] = ()
    values: Sequence[float] = ()
    undamped: float = nan
    parts: frozenset[str] = field(default=frozenset())
    change: float = nan
    outcome: float = KEPT

    @property
    def member(self) -> LayerBlocks:
        """The layer's blocks in the group."""
        return self.group.members[self.index]

    @property
    def key(self) -> str:
        """The key of the layer in checkpoints."""
        return self.member.layer.key

    @property
    def begins(self) -> bool:
        """Whether the layer has no usable result: it was never refreshed as a whole, or its result is invalid."""
        failures, blocks = self.group.failures, self.member.blocks
        if failures.invalid is not None and failures.has_invalid and bool(failures.invalid[blocks].any()):
            return True
        return not self.group.ready[self.index]

    @property
    def value(self) -> float:
        """The largest of the measured values; nan if any is."""
        return nan if any(map(isnan, self.values)) else max(self.values)

    def work_share(self, parts: Collection[str]) -> float:
        """Return the part of the work of a complete refresh that some parts take."""
        costs = {task.name: task.cost for task in self.group.tasks}
        return sum(costs[name] for name in parts) / (sum(costs.values()) or 1.0)

    @property
    def kept_parts(self) -> set[tuple[str, str]]:
        """The parts that are not refreshed: pairs of layer key and part name."""
        return {(self.key, task.name) for task in self.group.tasks if task.name not in self.parts}

    def apply(self, verdicts: Sequence[Verdict]) -> None:
        """Apply the verdicts on the units: the layer is refreshed if any is, and stopped if all are."""
        due = [unit.parts for unit, verdict in zip(self.units, verdicts, strict=True) if verdict == "renew"]
        self.parts = frozenset().union(*due)
        # Without a capture since the last decision it is unknown whether the layer has converged.
        has_news = self.undamped != self.state.undamped(self.index)
        stops = has_news and all(verdict == "stop" for verdict in verdicts)
        self.outcome = REFRESHED if self.parts else STOPPED if stops else KEPT

    def begin_refresh(self) -> None:
        """Record that the parts are being refreshed from the current statistics."""
        read = (unit.statistics for unit in self.units if unit.parts <= self.parts)
        self.state.begin_refresh(self.index, frozenset().union(*read))


def layer_decisions(groups: Sequence[BlockGroup], keys: Collection[str] | None = None) -> Iterator[LayerDecision]:
    """Yield the layers with these `keys` that this rank is a worker of. None: all layers."""
    for group in groups:
        if group.decisions is None or (keys is not None and not group.role.is_gradient_worker):
            continue
        for index, member in enumerate(group.members):
            if keys is None or member.layer.key in keys:
                yield LayerDecision(group, group.decisions, index)


def measure_all(layers: Sequence[LayerDecision], measure: Measure, by: By, damping: float) -> None:
    """Measure layers. Layers that cannot be measured get nan. Waits for the device."""
    for group in {id(layer.group): layer.group for layer in layers}.values():
        own, group_units = [layer for layer in layers if layer.group is group], units(group, by)
        available = measure != "nothing" and measurable(group.curvature, group.statistics, measure)
        available = available and group.weight is not None and bool(group.results or measure != "basis")
        values = measured(group, measure, by).T.double().tolist() if available else None
        for layer in own:
            layer.units = group_units
            layer.values = [nan] * len(group_units) if values is None else values[layer.index]
            layer.undamped = layer.value
            if measure == "trace":
                trace = damping * group.factor * group.parameters(layer.member)
                layer.values = [value + trace for value in layer.values]


def decide_all(layers: Sequence[LayerDecision], criterion: RefreshRule, plan: Plan[str], step: int) -> None:
    """Decide on measured layers with a rule. Layers without a usable result are refreshed in any case.

    Raises:
        ValueError: if the rule does not return a verdict on each candidate.
    """
    position = {key: index for index, key in enumerate(plan.weights)}
    candidates: list[Candidate] = []
    undecided: list[LayerDecision] = []
    for layer in sorted(layers, key=lambda layer: position[layer.key]):
        last = layer.state.last(layer.index)
        changes = [criterion.change(value, last) for value in layer.values]
        layer.change = max(changes)
        if layer.begins:
            layer.apply(["renew"] * len(layer.units))
            continue
        undecided.append(layer)
        name, index = layer.member.layer.name, position[layer.key]
        for unit, value, change in zip(layer.units, layer.values, changes, strict=True):
            work = plan.weights[layer.key] * layer.work_share(unit.parts)
            candidates.append(Candidate(name, index, unit.statistics, step, value, last, change, work))
    verdicts = list(criterion.decide(candidates)) if candidates else []
    _check_verdicts(verdicts, candidates, criterion)
    remaining = iter(verdicts)
    for layer in undecided:
        layer.apply([next(remaining) for _ in layer.units])


def _check_verdicts(verdicts: Sequence[object], candidates: Sequence[Candidate], criterion: RefreshRule) -> None:
    allowed = [word for word in get_args(Verdict) if criterion.stops or word != "stop"]
    fits = len(verdicts) == len(candidates) and all(verdict in allowed for verdict in verdicts)
    words = f"one of {', '.join(map(repr, allowed))} for each of {len(candidates)} candidates"
    require(fits, f"{type(criterion).__name__}.decide()", verdicts, words + " ('stop' only where the rule `stops`)")


class DecisionState:
    """The last decision on each of the M layers of a group, and the reference of the next measurement.

    Attributes:
        numbers: For each layer what the rule remembers, the last decision, and the value measured without damping
            ``[M, 3]``; on the host.
        last_averages: The averages of the last refresh, packed. Empty unless the rule compares averages.
        in_progress: The indices of the layers whose refresh is in progress.
    """

    def __init__(self, group: BlockGroup, *, compares_averages: bool) -> None:
        """Start without decisions, and without tensors on a device."""
        self._group, self._compares_averages = group, compares_averages
        self.numbers = torch.tensor([_NOTHING] * len(group.members), dtype=torch.float64, device="cpu")
        self.last_averages = StateTensors()
        self.in_progress: set[int] = set()

    @property
    def _compared(self) -> list[Statistic]:
        """The statistics whose averages this rank keeps for comparison."""
        names = read_by_tasks(self._group) if self._compares_averages and self._group.role.is_gradient_worker else ()
        return [spec for spec in self._group.statistics if spec.name in names]

    def last(self, index: int) -> float | None:
        """Return the number that the rule remembers for a layer. None: none."""
        value = float(self.numbers[index, 0])
        return None if isnan(value) else value

    def undamped(self, index: int) -> float:
        """Return the value measured without damping at the last decision on a layer. nan: none."""
        return float(self.numbers[index, 2])

    def outcome(self, index: int) -> float:
        """Return the last decision on a layer; 0: there was none."""
        return float(self.numbers[index, 1])

    def describe(self, layer: Layer) -> str:
        """Return a word for the last decision on a layer. Empty: refreshed, or no decision."""
        index = next(index for index, member in enumerate(self._group.members) if member.layer is layer)
        return _WORDS.get(self.outcome(index), "")

    @property
    def bytes_per_block(self) -> int:
        """The bytes of `last_averages` for one block."""
        dtype = self._group.work_dtype
        return sum(prod(packed_shape(spec)) * spec_dtype(spec, dtype).itemsize for spec in self._compared)

    def note(self, index: int, last: float | None, outcome: float, undamped: float) -> None:
        """Record the numbers of a decision on a layer."""
        numbers = (nan if last is None else last, outcome, undamped)
        self.numbers[index] = torch.tensor(numbers, dtype=torch.float64, device="cpu")

    # --- Refreshes -------------------------------------------------------------------------------------------------

    def begin_refresh(self, index: int, statistics: Collection[str]) -> None:
        """Record that a layer is being refreshed from the current values of some `statistics`."""
        self.in_progress.add(index)
        blocks, names = self._group.members[index].blocks, tuple(spec.name for spec in self._compared)
        read = tuple(name for name in names if name in statistics)
        for name, average in self._group.snapshot(blocks, read).items():
            self._allocate().write(name, blocks, average)

    def end_refresh(self, index: int, *, failed: bool) -> None:
        """Record the end of a refresh. If it `failed`, it is repeated at the next decision."""
        self.in_progress.discard(index)
        if failed:
            self._forget(index, _AGAIN)

    def _forget(self, index: int, numbers: tuple[float, float, float]) -> None:
        """Drop the reference of the next measurement, so that the layer counts as changed."""
        self.in_progress.discard(index)
        self.note(index, *numbers)
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
        tensors = {_NUMBERS: self.numbers[index].expand(n, -1)}
        tensors |= {f"{_PREFIX}{name}": averages.whole(name, member.blocks) for name in averages}
        if index not in self.in_progress:
            return tensors
        # Refreshes in progress are not saved: a resumed training starts them again.
        blank = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        return {**blank, _NUMBERS: torch.tensor(_AGAIN, dtype=torch.float64, device="cpu").expand(n, -1)}

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
        self.in_progress.discard(index)
        self.numbers[index] = given[_NUMBERS][0].to(self.numbers)
        averages = self._allocate()
        for name in averages:
            averages.write_whole(name, member.blocks, given[f"{_PREFIX}{name}"].to(self._group.device))
