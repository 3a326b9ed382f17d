"""The layers of a model, the groups of their blocks and the plan of their ranks; built anew when the model changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from math import prod
from zlib import crc32

from torch import nn

from natgrad.curvature import Curvature, Curvatures
from natgrad.curvature.base import computed_for, declarations, gathered, statistics_of, summed
from natgrad.distributed import Assignment, LayerDemand, Placement, Plan, make_plan
from natgrad.distributed.fsdp import find_mesh, is_sharded, managed, reshard
from natgrad.errors import require
from natgrad.layers import Layer, Slot
from natgrad.linalg.device import memory_of, on_host
from natgrad.linalg.precision import Precision, at_least_float32
from natgrad.preconditioner.coverage import cover
from natgrad.refresh import RefreshRule
from natgrad.state import state as states
from natgrad.state.block_group import BlockGroup, RankRole
from natgrad.state.decisions import DecisionState, check_use
from natgrad.state.tensors import packed_shape, spec_dtype


class Structure:
    """Which layers a model has, the groups of their blocks, and the ranks that work for them."""

    def __init__(
        self,
        root: nn.Module,
        curvature: Curvature | Curvatures,
        precision: Precision,
        *,
        placement: Placement,
        rank: int,
        ranks: int,
        refresh: RefreshRule | None = None,
        factor: Callable[[Layer], float] = lambda _: 1.0,
        reduces: bool = False,
    ) -> None:
        """Cover the layers of `root`, with a `factor` of γ for each; no tensor is made.

        `reduces`: natgrad itself averages the gradients of several ranks.
        """
        self.root, self._curvature, self.precision = root, curvature, precision
        self._given = self._placement = placement
        self._rank, self._ranks = rank, ranks
        self._refresh, self._factor, self._reduces = refresh, factor, reduces
        self._sharded = reshard(root.modules())
        self._assignments: dict[str, Assignment] = {}
        self._build()
        if refresh is not None:
            check_use(refresh, self.coverage.layers)

    def _build(self) -> None:
        self.coverage = cover(self.root, self._curvature)
        self._signature = self.coverage.signature()
        self._form = self.coverage.signature(trained=False)
        self.plan = self._planned()
        _check_combinations(self.coverage.layers, self.plan.placement, self._refresh, self._ranks)
        idle = self.plan.placement.deferred and self._ranks > 1 and self.coverage.layers and not self.plan.defers
        allowed = "False: no layer has factors that can wait, as those of K-FAC"
        require(bool(self._assignments) or not idle, "deferred", True, allowed)  # later layers may be frozen
        self._assignments.update(self.plan.assignments)
        rule = self._refresh
        self.groups = group_layers(
            self.coverage.layers,
            self.precision,
            self.plan,
            self._rank,
            self._factor,
            separate=rule is not None and rule.separate,
        )
        measure = None if rule is None else rule.measure
        measured = [] if measure is None else [group for group in self.groups if not group.gathered]
        self.decisions = {group: DecisionState(group, measure) for group in measured if measure is not None}

    @property
    def slots(self) -> list[Slot]:
        """Every parameter, or part of one, of the covered layers."""
        return [slot for layer, _ in self.coverage.layers for slot in layer.slots]

    @property
    def summed(self) -> list[BlockGroup]:
        """The groups whose statistics are summed."""
        return [group for group in self.groups if group.statistics]

    @property
    def gathered(self) -> list[BlockGroup]:
        """The groups whose statistics are gathered."""
        return [group for group in self.groups if group.gathered]

    @property
    def shares_work(self) -> bool:
        """Whether ranks are workers of some layers only, and exchange preconditioned gradients."""
        return self.plan.columns > 1

    def digest(self) -> int:
        """Return a number that is the same on ranks with the same plan for the same layers."""
        sizes = [
            (member.layer.key, group.outputs, group.inputs, group.factor)
            for group in self.groups
            for member in group.members
        ]
        return crc32(repr((str(self.plan.placement), self.plan.assignments, sizes)).encode())

    def _planned(self) -> Plan[str]:
        works = {layer.key: demand_of(layer, curvature, self.precision) for layer, curvature in self.coverage.layers}
        # Layers that remain keep their workers, because other ranks may not have their curvature, and "auto" chooses
        # once. It chooses comm-opt for curvatures that read computed tensors or gather rows, otherwise one worker a
        # layer where natgrad averages the gradients, or where they would be gathered on all ranks (FSDP2, not HSDP).
        placement, factor_refreshes, mesh = self._placement, 10.0, find_mesh(self.root)
        is_split = mesh is not None and mesh.ndim == 1 and self._ranks > 1
        owns = placement.name == "auto" and (self._reduces or is_split)
        if self._refresh is not None and (owns or placement.positions is not None):
            self._refresh.check(0)
            factor_refreshes = self._refresh.inverse_interval(0) / self._refresh.factor_interval(0)
        needs_comm_opt = any(
            computed_for(own) or gathered(own)
            for own in (statistics_of(curvature, layer) for layer, curvature in self.coverage.layers)
        )
        choices = []
        if placement.name == "auto" and needs_comm_opt:
            placement = replace(placement, name="comm-opt")
        elif owns:
            # Averages are sent to all ranks, sums to the worker alone: in half the bytes.
            saves = self._reduces and factor_refreshes > 2 and any(work.can_wait for work in works.values())
            if placement.deferred or (placement.deferred is None and saves):
                choices.append(replace(placement, name="mem-opt", deferred=True))
            if not placement.deferred:
                choices.append(replace(placement, name="reduce-scatter"))
        plan = make_plan(
            placement,
            works,
            self._ranks,
            self._assignments,
            factor_refreshes=factor_refreshes,
            share=_memory_share(self.coverage.layers, self._ranks),
            choices=choices,
        )
        self._placement = plan.placement
        return plan

    def plan_for_reduction(self) -> None:
        """Choose anew by "auto" for gradients that natgrad averages, unless other ranks hold a part of the state."""
        if not self.shares_work:
            self._reduces, self._placement, self._assignments = True, self._given, {}
            self.rebuild()

    def rebuild(self) -> None:
        """Follow parameters that were moved, frozen, thawed or replaced; blocks of unchanged shape keep their state."""
        remaining = [group for group in self.groups if any(m.layer.slots[0].is_present for m in group.members)]
        known, rows = states.blocks(remaining, self.decisions), self.plan.rows
        self._build()
        self.plan = replace(self.plan, rows={key: count for key, count in rows.items() if key in self.plan.layers})
        states.restore(states.fitting(known, self.groups, self.decisions), self.groups, self.decisions)

    def ahead(self) -> Structure:
        """Return a rebuilt copy if the model has changed, otherwise this object. Sends nothing."""
        if not self.is_outdated:
            return self
        other = copy(self)
        other._assignments = dict(self._assignments)
        other.rebuild()
        return other

    @property
    def is_newly_sharded(self) -> bool:
        """Whether FSDP2 shards the model since it was built."""
        return not self._sharded and bool(managed(place.module for place in self.coverage.watched))

    @property
    def has_other_layers(self) -> bool:
        """Whether modules or shapes have changed since it was built; freezing may be for one pass only."""
        return self.coverage.signature(trained=False) != self._form

    @property
    def is_outdated(self) -> bool:
        """Whether parameters were moved, frozen, thawed or replaced since it was built."""
        reshard(place.module for place in self.coverage.watched)
        return self.coverage.signature() != self._signature

    def move(self) -> bool:
        """Move all tensors to where the parameters are now; return whether any was elsewhere."""
        moved = [
            states.follow(group, self.decisions.get(group)) for group in self.groups
        ]  # a list, because `any` alone would stop at the first group that has moved
        return any(moved)


def group_layers(
    layers: list[tuple[Layer, Curvature]],
    precision: Precision,
    plan: Plan[str],
    rank: int,
    factor: Callable[[Layer], float] = lambda _: 1.0,
    *,
    separate: bool = False,
) -> list[BlockGroup]:
    """Put layers with the same curvature, sizes, dtype, device, workers and damping into one group, in their order."""
    groups: dict[tuple[object, ...], tuple[Curvature, list[Layer], RankRole, float]] = {}
    for layer, curvature in layers:
        parameter, role, own = layer.slots[0].parameter, RankRole.of(plan, layer.key, rank), factor(layer)
        place = parameter.dtype, parameter.device, role.assignment.workers, role.assignment.sums
        key = (id(curvature), layer.outputs, layer.inputs, *place, own)
        groups.setdefault(key, (curvature, [], role, own))[1].append(layer)
    return [
        BlockGroup.of(curvature, members, precision, role, own_factor, separate=separate)
        for curvature, members, role, own_factor in groups.values()
    ]


def demand_of(layer: Layer, curvature: Curvature, precision: Precision) -> LayerDemand:
    """Return the sizes and costs of a layer for the planner, from the declarations of its curvature."""
    sizes, n = (layer.outputs, layer.inputs), layer.blocks
    statistics, tasks, state = declarations(curvature, *sizes)
    rows, statistics = gathered(statistics), summed(statistics)
    kept_rows = [spec for spec in rows if spec.source != "both"]
    written = [spec for task in tasks for spec in task.writes]
    batch_sized = [spec for spec in (*kept_rows, *written) if spec.sized_by_batch]
    kept = [spec for spec in (*written, *state) if not spec.sized_by_batch]
    parameter = layer.slots[0].parameter
    factors, held = precision.factor_dtype(parameter), precision.solve_dtype(parameter)

    def held_rows(count: int) -> int:
        numbers = 2 * at_least_float32(held).itemsize  # of samples, and the damping
        return n * (numbers + sum(spec.sized(count).numel * spec_dtype(spec, held).itemsize for spec in batch_sized))

    return LayerDemand(
        parts={task.name: task.cost * n for task in tasks},
        sums=n * sum(prod(packed_shape(spec)) for spec in statistics),
        results={task.name: n * sum(prod(packed_shape(spec)) for spec in task.writes) for task in tasks},
        rows=held_rows if rows else None,
        gradients=n * prod(sizes),
        step_cost=n * curvature.step_cost(*sizes),
        is_sharded=any(is_sharded(slot.parameter) for slot in layer.slots),
        blocks=n,
        averages=n * sum(prod(packed_shape(spec)) * spec_dtype(spec, factors).itemsize for spec in statistics),
        held=n * sum(spec.numel * spec_dtype(spec, held).itemsize for spec in kept),
        can_wait=bool(statistics)
        and not any(spec.used_by_precondition for spec in statistics)
        and not any(task.restarts for task in tasks),
        alone=layer.form != "one-hot",
    )


def _check_combinations(
    covered: Sequence[tuple[Layer, Curvature]], placement: Placement, refresh: RefreshRule | None, ranks: int
) -> None:
    """Check that curvatures, placement and refresh rule go together.

    Raises:
        ValueError: if they do not, unless `ranks` is 1 and one process can do it.
    """
    rule, where = placement.rule, str(placement)
    for layer, curvature in covered:
        statistics = statistics_of(curvature, layer)
        # A layer's only worker captures alone, but lookups are summed over all ranks.
        for_others = layer.form == "one-hot" if rule.uses_own_samples else not rule.all_ranks_work
        computed = computed_for(statistics)
        allowed = (
            f"'comm-opt', 'pipelined', 'background', 'hybrid:1' or 'dp': {curvature!r} uses {', '.join(computed)} in "
            "captures, so every rank that captures must hold it"
        )
        require(ranks == 1 or not (computed and for_others), "placement", where, allowed)
        allowed = f"another than 'background': {curvature!r} uses the rows of the same step"
        require(not (rule.renews_in_background and gathered(statistics)), "placement", where, allowed)
    if refresh is not None and refresh.separate:
        allowed = (
            "another than 'background' and 'pipelined': these treat both sides of a layer together, and "
            f"{refresh!r} at different steps"
        )
        require(not (rule.renews_in_background or rule.sends_during_backward), "placement", where, allowed)


def _memory_share(layers: Sequence[tuple[Layer, Curvature]], ranks: int) -> int | None:
    """Return the bytes that the curvature of a rank may take under "auto" unless the user sets them.

    A quarter of the memory of its device; on the host a quarter of the machine's memory, which all ranks may share.
    """
    if not layers:
        return None
    device = layers[0][0].slots[0].parameter.device
    memory = memory_of(device)
    return None if memory is None else memory // (4 * ranks if on_host(device) else 4)
