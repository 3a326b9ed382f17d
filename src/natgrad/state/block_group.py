"""All blocks of equal size with one curvature, stored as one tensor for each statistic and result."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from natgrad.curvature import Curvature
from natgrad.curvature.base import (
    computed_for,
    declarations,
    gathered,
    input_statistics,
    summed,
)
from natgrad.distributed import Assignment, Plan
from natgrad.distributed.fsdp import between_steps
from natgrad.layers import Layer
from natgrad.linalg import tensor_on
from natgrad.linalg.device import known_all
from natgrad.linalg.precision import Precision, at_least_float32
from natgrad.specs import ROWS, Statistic, Task, TensorSpec
from natgrad.state.failures import FailureState
from natgrad.state.tensors import StateTensors, along, diagonals, packed_shape, spec_dtype, unpack

if TYPE_CHECKING:
    from natgrad.preconditioner.refresh.decisions import DecisionState

# The bytes of gradients that are preconditioned together, which bounds the memory of intermediate results.
_PIECE = 2**26


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


class BlockGroup:
    """All blocks with one curvature, one size and the same workers: N blocks ``[o, i]`` of one or more layers.

    Attributes:
        curvature: Their curvature.
        outputs: The number of outputs, o.
        inputs: The number of inputs, i.
        members: The layers.
        size: The number of blocks, N.
        averages: Running averages of the statistics ``[N, *shape]``. Empty before the first factor refresh.
        weight: The bias correction ``1 - dᵏ`` of each block's running averages ``[N]``.
        input_weight: The bias correction of statistics of inputs only ``[N]``, if these are `inputs_apart`.
        inputs_apart: Whether statistics of inputs only have a separate interval.
        decisions: The decisions of a refresh rule on the layers. None: there is no such rule.
        results: The results of the tasks ``[N, *shape]``. Empty before the first inverse refresh.
        memory: The state of the curvature ``[N, *shape]``. Empty before it is first used.
        good: For each task and block, whether `results` has a result.
        ready: For each layer, whether `results` is complete.
        failures: The failures of its blocks.
        basis_version: How often each block's running averages were restarted (`Task.restarts`).
        statistics: The statistics of the curvature that are summed.
        gathered: The statistics whose rows are gathered.
        rows: The number of gathered rows (`natgrad.specs.ROWS`). 0 before the first refresh.
        tasks: The tasks of the curvature.
        memory_specs: The specs of `memory`.
        input_statistics: The names of the statistics of inputs only.
        computed_for_capture: The names of the results that are read when statistics are accumulated.
        restarting: The names of the statistics whose running averages tasks may restart.
        role: The role of this rank for the layers.
        factor: The factor on the damping γ for this group.
    """

    def __init__(
        self, curvature: Curvature, layers: list[Layer], precision: Precision, role: RankRole, factor: float = 1.0
    ) -> None:
        """Compute the layout of the blocks of `layers`, without allocating tensors."""
        self.role, self.factor = role, factor
        self.curvature = curvature
        self.outputs, self.inputs = layers[0].outputs, layers[0].inputs
        statistics, self.tasks, self.memory_specs = declarations(curvature, self.outputs, self.inputs)
        self.statistics, self.gathered, self.rows = summed(statistics), gathered(statistics), 0
        self.input_statistics = input_statistics(curvature, self.statistics)
        self.computed_for_capture = computed_for(self.statistics)
        self.restarting = {name for task in self.tasks for name in task.restarts}
        self.members: list[LayerBlocks] = []
        self.size = 0
        for layer in layers:
            self.members.append(LayerBlocks(layer, self.size, self.size + layer.blocks))
            self.size += layer.blocks
        self._precision = precision
        self._last_plain: Tensor | None = None
        self._place = self.device, self.dtype
        self.averages = StateTensors()
        self.weight: Tensor | None = None
        self.input_weight: Tensor | None = None
        self.inputs_apart = False
        self.decisions: DecisionState | None = None
        self.results = StateTensors()
        self.memory = StateTensors()
        self.good = {task.name: [False] * self.size for task in self.tasks}
        self.ready = [False] * len(self.members)
        self.failures = FailureState((task.name for task in self.tasks), self.size)
        self.basis_version = [0] * self.size

    # Not cached, because the model may be moved.

    @property
    def device(self) -> torch.device:
        """The device of the parameters; the host if they are on the meta device, so that a state can be loaded."""
        return torch.device("cpu") if self._parameter.is_meta else self._parameter.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which statistics are summed: that of the running averages, at least float32."""
        return at_least_float32(self._precision.factor_dtype(self._parameter))

    @property
    def work_dtype(self) -> torch.dtype:
        """The dtype of decompositions and of preconditioning: at least float32."""
        return at_least_float32(self._solve_dtype)

    @property
    def _solve_dtype(self) -> torch.dtype:
        return self._precision.solve_dtype(self._parameter)

    @property
    def _parameter(self) -> Tensor:
        parameter = self.members[0].layer.slots[0].parameter
        like = between_steps(parameter, self._last_plain)
        if like is not parameter:
            self._last_plain = like
        return like

    def follow(self) -> bool:
        """Move all tensors to the device and dtypes of the parameters, and return whether these have changed."""
        before, self._place = self._place, (self.device, self.dtype)
        if self._place == before:
            return False
        self.failures.to(self.device)
        self.weight, self.input_weight = (
            None if weight is None else weight.to(self.device, self.dtype)
            for weight in (self.weight, self.input_weight)
        )
        self.averages = self.averages.to(self._precision.factor_dtype(self._parameter), self.device)
        self.results, self.memory = (kept.to(self._solve_dtype, self.device) for kept in (self.results, self.memory))
        if self.decisions is not None:
            self.decisions.to(self.work_dtype, self.device)
        return True

    def allocate_averages(self) -> Tensor:
        """Allocate the running averages unless they exist, and return the bias corrections."""
        if self.weight is None:
            self.weight = torch.zeros(self.size, dtype=self.dtype, device=self.device)
            self.input_weight = self.weight.clone() if self.inputs_apart else None
            dtype = self._precision.factor_dtype(self._parameter)
            self.averages = StateTensors(self.statistics, self.size, dtype, self.device, pack=True)
        return self.weight

    @property
    def weights(self) -> list[Tensor]:
        """All bias corrections."""
        return [weight for weight in (self.weight, self.input_weight) if weight is not None]

    def weight_of(self, statistic: str) -> Tensor | None:
        """Return the bias correction of a statistic ``[N]``; None: there are no running averages."""
        return self.weight if self.input_weight is None or statistic not in self.input_statistics else self.input_weight

    def allocate_results(self) -> StateTensors:
        """Allocate the results of tasks unless they exist, and return them."""
        if not self.results:
            self.results = self.draft(self.size, self.rows)
        return self.results

    def draft(self, size: int, rows: int) -> StateTensors:
        """Return zeros for the results of so many blocks, with this number of rows."""
        return StateTensors(self.written(rows), size, self._solve_dtype, self.device)

    def allocate_memory(self) -> StateTensors:
        """Allocate the curvature's state unless it exists, and return it."""
        if not self.memory:
            self.memory = StateTensors(self.memory_specs, self.size, self._solve_dtype, self.device)
        return self.memory

    # --- Reading ------------------------------------------------------------------------------------------------

    def snapshot(
        self, blocks: slice | Tensor, names: tuple[str, ...], diagonal: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Return copies of the bias-corrected running averages of some blocks, packed, in `work_dtype`.

        For statistics in `diagonal`, only diagonals are returned.
        """
        result = {}
        for spec in self.statistics:
            if spec.name in names:
                average, weight = self.averages.read(spec.name, blocks), self.weight_of(spec.name)
                assert weight is not None
                average = diagonals(average, spec) if spec.name in diagonal else average
                result[spec.name] = torch.div(average, along(weight[blocks], average.ndim - 1)).to(self.work_dtype)
        return result

    def corrected(
        self, blocks: slice | Tensor, names: tuple[str, ...], diagonal: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Return the inputs of tasks for some blocks: bias-corrected running averages, unpacked, and state."""
        averages = unpacked(self.snapshot(blocks, names, diagonal), self.statistics, diagonal)
        return {**averages, **self.read_memory(blocks, names)}

    def read_memory(self, blocks: slice | Tensor, names: Collection[str]) -> dict[str, Tensor]:
        """Return some tensors of the curvature's state for some blocks, in `work_dtype`."""
        found = [spec.name for spec in self.memory_specs if spec.name in names]
        return {name: self.allocate_memory().read(name, blocks).to(self.work_dtype) for name in found}

    def live_averages(self, blocks: slice | Tensor) -> dict[str, Tensor]:
        """Return the running averages of some blocks that preconditioning reads."""
        names = tuple(spec.name for spec in self.statistics if spec.used_by_precondition)
        return self.corrected(blocks, names) if names else {}

    def computed(self, blocks: slice | Tensor) -> dict[str, Tensor]:
        """Return the results of the tasks for some blocks."""
        return self._results_of(self.results, blocks, self.work_dtype)

    def read_for_capture(self, member: LayerBlocks) -> dict[str, Tensor] | None:
        """Return the results that are read when a layer's statistics are accumulated; None: they are incomplete."""
        if not self.ready[self.members.index(member)]:
            return None
        return self._results_of(self.computed_for_capture, member.blocks, self.dtype)

    def _results_of(self, names: Iterable[str], blocks: slice | Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return some results for some blocks, in `dtype` unless the curvature accepts narrow ones."""
        results = {name: self.results.read(name, blocks) for name in names}
        return results if self.curvature.takes_narrow else {name: result.to(dtype) for name, result in results.items()}

    def previous(self, task: Task, blocks: slice) -> dict[str, Tensor] | None:
        """Return the last results of a task for some blocks; None: it does not need them, or some are missing."""
        if not (task.needs_previous and all(self.good[task.name][blocks])):
            return None
        return {spec.name: self.results.read(spec.name, blocks).to(self.work_dtype) for spec in task.writes}

    def blocks_of(self, members: Sequence[LayerBlocks]) -> slice | Tensor:
        """Return the blocks of some layers, in the order of the group, as an index."""
        if len(members) == len(self.members):
            return slice(None)
        return tensor_on(self.device, [block for member in members for block in range(member.start, member.stop)])

    def are_ready(self, members: Sequence[LayerBlocks]) -> list[bool]:
        """Return whether `results` is complete for some layers."""
        if len(members) == len(self.members):
            return self.ready
        return [self.ready[self.members.index(member)] for member in members]

    # --- Preconditioning ----------------------------------------------------------------------------------------

    def solve(self, members: Sequence[LayerBlocks], W: Tensor, damping: float) -> Tensor:
        """Return the preconditioned gradients of some layers, and update the curvature's state by finite gradients.

        Args:
            members: The layers.
            W: Their gradients ``[n, o, i]`` in `work_dtype`. Those of layers without complete results are returned
                unchanged, unless the curvature does without.
            damping: γ.
        """
        ready = self.are_ready(members)
        if len(set(ready)) > 1:
            parts = W.split([member.stop - member.start for member in members])
            return torch.cat([self.solve([member], part, damping) for member, part in zip(members, parts, strict=True)])
        has_results = any(ready)
        if not has_results and self.curvature.needs_results:
            return W
        blocks, step = self.blocks_of(members), max(1, _PIECE * W.shape[0] // max(1, W.nbytes))
        V = W if step >= len(W) else torch.empty_like(W)
        for start in range(0, len(W), step):
            piece = slice(start, min(start + step, len(W)))
            index, gradient = piece if isinstance(blocks, slice) else blocks[piece], W[piece]
            state: dict[str, Tensor] = {}
            if self.memory_specs:
                memory = self.allocate_memory()
                state = {spec.name: memory.read(spec.name, index).to(W.dtype) for spec in self.memory_specs}
                finite = gradient.flatten(1).sum(1).isfinite()
                for name, values in self.curvature.update_state(state, gradient).items():
                    is_finite = along(finite, values.ndim - 1)
                    state[name] = values if known_all(finite) else torch.where(is_finite, values, state[name])
                    memory.write(name, index, state[name])
            names = self.results if has_results else ()
            computed, averages = self._results_of(names, index, W.dtype), self.live_averages(index)
            solved = self.curvature.precondition(computed, averages, state, gradient, damping * self.factor)
            if step >= len(W):
                return solved
            V[piece] = solved
        return V

    # --- Bookkeeping --------------------------------------------------------------------------------------------

    def bytes_per_block(self) -> int:
        """Return the bytes on this rank for one block: running averages, results and state."""
        factors, held = (f(self._parameter) for f in (self._precision.factor_dtype, self._precision.solve_dtype))
        kept = [
            *((packed_shape(spec), spec_dtype(spec, factors)) for spec in self.statistics if self.role.keeps_averages),
            *(
                (spec.shape, spec_dtype(spec, held))
                for spec in (*self.written(self.rows), *self.memory_specs)
                if self.role.is_gradient_worker
            ),
        ]
        compared = 0 if self.decisions is None else self.decisions.bytes_per_block
        return compared + sum(prod(shape) * dtype.itemsize for shape, dtype in kept)

    def parameters(self, member: LayerBlocks) -> int:
        """Return the number of elements of a layer's blocks."""
        return (member.stop - member.start) * self.outputs * self.inputs

    def charge(self, members: Sequence[LayerBlocks], seconds: float) -> None:
        """Add host seconds to some layers, in proportion to their blocks."""
        blocks = sum(member.stop - member.start for member in members)
        for member in members:
            member.layer.seconds += seconds * (member.stop - member.start) / blocks

    def restart(self, task: Task, blocks: list[int]) -> None:
        """Restart the averages in `Task.restarts` of `blocks` whose task has succeeded."""
        if not task.restarts:
            return
        for block in blocks:
            self.basis_version[block] += 1
        for name in task.restarts if self.averages else ():
            self.averages[name][blocks] = 0

    def restarted_since(self, versions: Sequence[int], blocks: slice) -> Tensor | None:
        """Return which of some blocks were restarted since `versions`, of all blocks, as bool ``[n]``; None: none."""
        changed = [before != now for before, now in zip(versions[blocks], self.basis_version[blocks], strict=True)]
        return tensor_on(self.device, changed) if any(changed) else None

    def record_results(self, part: str, blocks: list[int], success: list[bool], *, forget: bool = False) -> None:
        """Record for which of some `blocks` the decompositions of a task succeeded.

        After a failure the last good result stays in use. With `forget` (for a loaded state), earlier results are
        ignored.
        """
        good = self.good[part]
        for block, fine in zip(blocks, success, strict=True):
            good[block] = fine or (good[block] and not forget)
        if not forget:
            self.failures.record_results(part, blocks, success)
        self.ready = [all(all(good[member.blocks]) for good in self.good.values()) for member in self.members]

    # --- Gathered rows ------------------------------------------------------------------------------------------

    @property
    def _result_specs(self) -> list[TensorSpec]:
        """The specs of `results`: gathered rows with their number of samples and their damping, and what tasks write.

        What links rows is read by tasks alone, and is not kept.
        """
        rows = [spec for spec in self.gathered if spec.source != "both"]
        numbers = (TensorSpec("samples", ()), TensorSpec("damping", ())) if self.gathered else ()
        return [*rows, *(spec for task in self.tasks for spec in task.writes), *numbers]

    def written(self, rows: int) -> list[TensorSpec]:
        """Return the specs of `results` for this number of rows."""
        return [spec.sized(rows) for spec in self._result_specs]

    @property
    def sized_by_batch(self) -> dict[str, TensorSpec]:
        """The specs of the tensors of `results` whose size depends on the batch, by name."""
        return {spec.name: spec for spec in self._result_specs if spec.sized_by_batch}

    def rows_of(self, state: Mapping[str, Tensor]) -> int:
        """Return the number of rows in the state of a layer."""
        first = state.get(self.gathered[0].name) if self.gathered else None
        return first.shape[1] if isinstance(first, Tensor) and first.ndim == 3 else 0

    def padded(self, name: str, values: Tensor, rows: int | None = None) -> Tensor:
        """Return values ``[n, ...]`` of a result, padded with zeros to this number of rows (None: `rows`)."""
        spec = self.sized_by_batch.get(name)
        if spec is None:
            return values
        missing = (self.rows if rows is None else rows) - values.shape[1]
        padding = [(0, missing if size == ROWS else 0) for size in reversed(spec.shape)]
        return pad(values, [number for pair in padding for number in pair])

    def resize(self, rows: int) -> None:
        """Change the number of rows of `results`, by cutting or padding with zeros."""
        if rows == self.rows:
            return
        before, kept, whole = self.results, min(rows, self.rows), slice(None)
        self.rows, self.results = rows, StateTensors()
        if not before:
            return
        fresh = self.allocate_results()
        for spec in self._result_specs:
            index = whole, *(slice(kept) if size == ROWS else whole for size in spec.shape)
            fresh.write(spec.name, whole, self.padded(spec.name, before.read(spec.name, whole)[index]))


def unpacked(
    averages: Mapping[str, Tensor], statistics: Sequence[Statistic], diagonal: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the averages of `BlockGroup.snapshot` unpacked, except those in `diagonal`."""
    specs = {spec.name: spec for spec in statistics if spec.name in averages}
    return {name: averages[name] if name in diagonal else unpack(averages[name], spec) for name, spec in specs.items()}
