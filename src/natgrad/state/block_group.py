"""All blocks of equal size with one curvature: their layout, and the tensors that are kept of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from natgrad.curvature import Curvature
from natgrad.curvature.base import check_sums, computed_for, declarations, gathered, input_statistics, summed
from natgrad.distributed import Assignment, Plan
from natgrad.distributed.fsdp import is_sharded
from natgrad.layers import Layer
from natgrad.linalg import tensor_on
from natgrad.linalg.precision import Precision, at_least_float32
from natgrad.specs import Statistic, Task, TensorSpec
from natgrad.state.failures import FailureState
from natgrad.state.tensors import StateTensors


@dataclass(frozen=True)
class RankRole:
    """The role of a rank for layers with the same workers.

    Attributes:
        assignment: The assignment of the layers, without owners.
        server: The worker that sends this rank the preconditioned gradients.
        is_gradient_worker: Whether this rank is a worker.
        keeps_averages: Whether this rank receives the sums and keeps their running averages.
        accumulates: Whether the sums include the samples of this rank.
    """

    assignment: Assignment
    server: int
    is_gradient_worker: bool
    keeps_averages: bool
    accumulates: bool

    @classmethod
    def of(cls, plan: Plan[str], key: str, rank: int) -> RankRole:
        """Return the role of a rank for a layer of a plan."""
        assignment = plan.assignments[key]
        return cls(
            assignment=Assignment(assignment.workers, {}, assignment.sums),
            server=plan.server(key, rank),
            is_gradient_worker=plan.is_gradient_worker(key, rank),
            keeps_averages=plan.keeps_averages(key, rank),
            accumulates=plan.accumulates(key, rank),
        )


@dataclass(frozen=True)
class LayerBlocks:
    """The position of a layer in its block group: blocks ``start`` to ``stop - 1``."""

    layer: Layer
    start: int
    stop: int

    @property
    def blocks(self) -> slice:
        """The blocks as a slice."""
        return slice(self.start, self.stop)


@dataclass(eq=False)
class BlockState:
    """What a rank keeps of the N blocks of a group, as `natgrad.state.averages` and `natgrad.state.results` write it.

    Attributes:
        averages: Running averages of the statistics ``[N, *shape]``. Empty before the first factor refresh.
        weight: The bias correction ``1 - dᵏ`` of each block's running averages ``[N]``.
        input_weight: The bias correction of statistics of inputs only ``[N]``, if these have an interval of their own.
        results: The results of the tasks ``[N, *shape]``. Empty before the first inverse refresh.
        memory: The state of the curvature ``[N, *shape]``. Empty before it is first used.
        rows: The number of gathered rows (`natgrad.specs.ROWS`) in `results`. 0 before the first refresh.
        good: For each task and block, whether `results` has a result.
        ready: For each layer, whether `results` is complete.
        basis_version: How often each block's running averages were restarted (`Task.restarts`).
        place: The device of the tensors and the dtype in which statistics are summed.
        plain: An empty tensor with the dtype and device of a parameter under FSDP2, which may be gathered or not.
    """

    good: dict[str, list[bool]]
    ready: list[bool]
    failures: FailureState
    basis_version: list[int]
    averages: StateTensors = field(default_factory=StateTensors)
    weight: Tensor | None = None
    input_weight: Tensor | None = None
    results: StateTensors = field(default_factory=StateTensors)
    memory: StateTensors = field(default_factory=StateTensors)
    rows: int = 0
    place: tuple[torch.device, torch.dtype] | None = None
    plain: Tensor | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockGroup:
    """All blocks with one curvature, one size and the same workers: N blocks ``[o, i]`` of one or more layers.

    Attributes:
        role: The role of this rank for the layers.
        factor: The factor on the damping γ for this group.
        statistics: The statistics of the curvature that are summed.
        input_statistics: The names of the statistics of inputs only.
        inputs_apart: Whether these have an interval of their own.
        computed_for_capture: The names of the results that are read when statistics are accumulated.
        restarting: The names of the statistics whose running averages tasks may restart.
        state: What this rank keeps of the blocks.
    """

    curvature: Curvature
    outputs: int
    inputs: int
    members: list[LayerBlocks]
    size: int
    role: RankRole
    precision: Precision
    factor: float
    statistics: tuple[Statistic, ...]
    gathered: tuple[Statistic, ...]
    tasks: tuple[Task, ...]
    memory_specs: tuple[TensorSpec, ...]
    input_statistics: Sequence[str]
    inputs_apart: bool
    computed_for_capture: Sequence[str]
    restarting: set[str]
    state: BlockState

    @classmethod
    def of(
        cls,
        curvature: Curvature,
        layers: Sequence[Layer],
        precision: Precision,
        role: RankRole,
        factor: float = 1.0,
        *,
        separate: bool = False,
    ) -> BlockGroup:
        """Return the group of some layers, without tensors; `separate`: whether sides have their intervals."""
        outputs, inputs = layers[0].outputs, layers[0].inputs
        specs, tasks, memory_specs = declarations(curvature, outputs, inputs)
        statistics = summed(specs)
        if statistics and layers[0].form == "matrix":  # other layers have rows of another kind
            check_sums(curvature, statistics, tasks, outputs, inputs)
        of_inputs = input_statistics(curvature, statistics)
        members, size = [], 0
        for layer in layers:
            members.append(LayerBlocks(layer, size, size + layer.blocks))
            size += layer.blocks
        group = cls(
            curvature=curvature,
            outputs=outputs,
            inputs=inputs,
            members=members,
            size=size,
            role=role,
            precision=precision,
            factor=factor,
            statistics=statistics,
            gathered=gathered(specs),
            tasks=tasks,
            memory_specs=memory_specs,
            input_statistics=of_inputs,
            inputs_apart=separate and 0 < len(of_inputs) < len(statistics),
            computed_for_capture=computed_for(statistics),
            restarting={name for task in tasks for name in task.restarts},
            state=BlockState(
                good={task.name: [False] * size for task in tasks},
                ready=[False] * len(members),
                failures=FailureState((task.name for task in tasks), size),
                basis_version=[0] * size,
            ),
        )
        group.state.place = group.place
        return group

    # Properties of the parameters, which may be moved.

    @property
    def parameter(self) -> Tensor:
        """A parameter of the group, or a tensor with the dtype and device that a sharded one has between steps."""
        slots = (member.layer.slots[0] for member in self.members)
        found = (slot.module._parameters.get(slot.leaf) for slot in slots)
        parameter = next(parameter for parameter in found if parameter is not None)
        if is_sharded(parameter):  # within a pass FSDP2 replaces it by a plain tensor, which may have another dtype
            self.state.plain = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        return parameter if self.state.plain is None else self.state.plain

    @property
    def device(self) -> torch.device:
        """The device of the parameters; the host if they are on the meta device, so that a state can be loaded."""
        return self.place[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which statistics are summed: that of the running averages, at least float32."""
        return self.place[1]

    @property
    def place(self) -> tuple[torch.device, torch.dtype]:
        """The device, and the dtype in which statistics are summed."""
        parameter = self.parameter
        device = torch.device("cpu") if parameter.is_meta else parameter.device
        return device, at_least_float32(self.precision.factor_dtype(parameter))

    @property
    def factor_dtype(self) -> torch.dtype:
        """The dtype of the running averages."""
        return self.precision.factor_dtype(self.parameter)

    @property
    def solve_dtype(self) -> torch.dtype:
        """The dtype in which results are kept."""
        return self.precision.solve_dtype(self.parameter)

    @property
    def work_dtype(self) -> torch.dtype:
        """The dtype of decompositions and of preconditioning: at least float32."""
        return at_least_float32(self.solve_dtype)

    def blocks_of(self, members: Sequence[LayerBlocks]) -> slice | Tensor:
        """Return the blocks of some layers, in the order of the group, as an index."""
        if len(members) == len(self.members):
            return slice(None)
        if len(members) == 1:
            return members[0].blocks
        return tensor_on(self.device, [block for member in members for block in range(member.start, member.stop)])

    def are_ready(self, members: Sequence[LayerBlocks]) -> list[bool]:
        """Return whether results are complete for some layers."""
        if len(members) == len(self.members):
            return self.state.ready
        return [self.state.ready[self.members.index(member)] for member in members]
