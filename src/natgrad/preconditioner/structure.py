"""The blocks of a model and the owners of their work; built anew when the model has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from zlib import crc32

from torch import nn

from natgrad.curvature import Curvature
from natgrad.curvature.base import computed_for, gathered, statistics_of
from natgrad.distributed import Assignment, Cycle, Link, Placement, Plan, make_plan
from natgrad.distributed.fsdp import reshard
from natgrad.errors import NatgradError
from natgrad.layers import Layer, Slot
from natgrad.linalg.device import on_host
from natgrad.linalg.precision import Precision
from natgrad.preconditioner.compatibility import check_combinations
from natgrad.preconditioner.coverage import cover
from natgrad.preconditioner.demand import work
from natgrad.preconditioner.renewal.decisions import DecisionState, check_use
from natgrad.refresh import RefreshRule
from natgrad.state import state as states
from natgrad.state.block_group import BlockGroup
from natgrad.state.roles import RankRole


class Structure:
    """Which layers a model has, the groups of their blocks, and who renews which.

    Attributes:
        root: The model without wrappers.
        precision: The dtypes.
        coverage: Which parameter has which curvature.
        groups: The blocks.
        plan: Who does what.
    """

    def __init__(
        self,
        root: nn.Module,
        curvature: Curvature | Mapping[str, Curvature | None],
        precision: Precision,
        *,
        placement: Placement,
        rank: int,
        ranks: int,
        refresh: RefreshRule | None = None,
        reduces: bool = False,
        factor: Callable[[Layer], float] = lambda _: 1.0,
    ) -> None:
        """Cover the layers of `root`, with a `factor` of γ for each; no tensor is made."""
        self.root, self._curvature, self.precision = root, curvature, precision
        self._placement, self._rank, self._ranks = placement, rank, ranks
        self._refresh, self._reduces, self._factor = refresh, reduces, factor
        self._sharded = reshard(root.modules())
        self._seated: dict[str, Assignment] = {}
        self._build()
        if refresh is not None:
            check_use(refresh, self.coverage.layers)

    def _build(self) -> None:
        self.coverage = cover(self.root, self._curvature)
        self._signature = self.coverage.signature()
        self.plan = self._planned()
        check_combinations(self.coverage.layers, self.plan.placement, self._refresh, None, self._ranks)
        self._seated.update(self.plan.seats)
        self.groups = group(
            self.coverage.layers,
            self.precision,
            self.plan,
            self._rank,
            self._factor,
        )
        if self._refresh is not None:
            self._prepare_refresh(self._refresh)

    @property
    def slots(self) -> list[Slot]:
        """Every parameter, or part of one, of the covered layers."""
        return [slot for layer, _ in self.coverage.layers for slot in layer.slots]

    def _prepare_refresh(self, rule: RefreshRule) -> None:
        """Have the groups keep what a refresh rule needs."""
        for group in self.groups:
            group.inputs_apart = rule.separate and 0 < len(group.input_statistics) < len(group.statistics)
            if rule.criterion is not None and not group.gathered:
                group.decisions = DecisionState(group, compares_averages=rule.criterion.measure == "drift")

    def digest(self) -> int:
        """Return a number that is the same on ranks with the same plan for the same layers."""
        sizes = [
            (member.layer.key, one.outputs, one.inputs, one.factor) for one in self.groups for member in one.members
        ]
        return crc32(repr((str(self.plan.placement), self.plan.seats, sizes)).encode())

    def _planned(self) -> Plan[str]:
        works = {layer.key: work(layer, curvature, self.precision) for layer, curvature in self.coverage.layers}
        cycle = None
        asks = self._placement.name == "auto" or self._placement.positions is not None
        if asks and self._ranks > 1 and self._refresh is not None:
            cycle = Cycle(**self._refresh.intervals(0), reduces=self._reduces)
        # Layers that stay keep their workers, who alone may have their curvature; and "auto" chooses once. Curvatures
        # that look need every rank, and so do the seconds of a rule with a cap.
        placement = self._placement
        looks = any(
            computed_for(own) or gathered(own)
            for own in (statistics_of(curvature, layer) for layer, curvature in self.coverage.layers)
        )
        looks = looks or (self._refresh is not None and self._refresh.share is not None)
        if placement.name == "auto" and (looks or (placement.link == Link() and self._accelerated)):
            placement = replace(placement, name="comm-opt")  # the costs known are those of a processor core
        plan = make_plan(placement, works, self._ranks, self._seated, cycle)
        self._placement = plan.placement
        return plan

    def follow(self, before: Callable[[], None]) -> bool:
        """Follow parameters that were moved, frozen, thawed or replaced; blocks of unchanged shape keep their state.

        Args:
            before: Is called where groups are about to be replaced.

        Returns:
            Whether the groups are new ones.

        Raises:
            NatgradError: if the model was sharded meanwhile.
        """
        if not self.is_outdated:
            return False
        before()
        self._build_anew()
        return True

    def ahead(self) -> Structure:
        """Return what `follow` would make of this one, which stays as it is; nothing is sent.

        Raises:
            NatgradError: as `follow`.
        """
        if not self.is_outdated:
            return self
        other = copy(self)
        other._seated = dict(self._seated)
        other._build_anew()
        return other

    def without_state(self) -> Structure:
        """Return one of the same layers, on the same ranks, whose blocks have no tensors yet."""
        other = copy(self)
        other._seated = dict(self._seated)
        other._build()
        return other

    @property
    def is_outdated(self) -> bool:
        """Whether parameters were moved, frozen, thawed or replaced since it was built.

        Raises:
            NatgradError: if the model was sharded meanwhile.
        """
        if reshard(place.module for place in self.coverage.watched) and not self._sharded:
            raise NatgradError("the model was sharded after its Preconditioner was built: call fully_shard before")
        return self.coverage.signature() != self._signature

    def _build_anew(self) -> None:
        known = states.blocks(self.groups)
        self._build()
        states.restore(states.fitting(known, self.groups), self.groups)

    @property
    def _accelerated(self) -> bool:
        return any(not on_host(slot.parameter) for layer, _ in self.coverage.layers for slot in layer.slots)

    def move(self) -> bool:
        """Move all tensors to where the parameters are now; tell whether any was elsewhere."""
        moved = [one.follow() for one in self.groups]  # all of them, not only up to the first
        return any(moved)


def group(
    layers: list[tuple[Layer, Curvature]],
    precision: Precision,
    plan: Plan[str],
    rank: int,
    factor: Callable[[Layer], float] = lambda _: 1.0,
) -> list[BlockGroup]:
    """Put layers with the same curvature, sizes, dtype, device, workers and damping into one group, in their order.

    Args:
        layers: The layers.
        precision: The dtypes.
        plan: Their workers.
        rank: This process's rank.
        factor: What γ is multiplied by for a layer.
    """
    groups: dict[tuple[object, ...], tuple[Curvature, list[Layer], RankRole, float]] = {}
    for layer, curvature in layers:
        parameter, role, own = layer.slots[0].parameter, RankRole.of(plan, layer.key, rank), factor(layer)
        key = (id(curvature), layer.outputs, layer.inputs, parameter.dtype, parameter.device, *role.shape, own)
        groups.setdefault(key, (curvature, [], role, own))[1].append(layer)
    return [BlockGroup(one[0], one[1], precision, *one[2:]) for one in groups.values()]
