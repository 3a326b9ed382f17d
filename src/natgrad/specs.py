"""The declarations of a curvature: its statistics, its state, and the tasks that compute tensors from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from math import prod
from typing import Literal, TypeAlias

from torch import Tensor

from natgrad.errors import require, require_one_of, with_suggestions
from natgrad.schedule import is_whole

# Tensors by the name of their `TensorSpec`.
Tensors: TypeAlias = Mapping[str, Tensor]

ROWS = 0
"""In the shape of a `TensorSpec`: the number of rows selected from the last batch; 0 before the first."""

# Names of a layer's other entries in checkpoints.
_RESERVED = ("weight", "early weight", "renewed", "ladder", "rule")


@with_suggestions
@dataclass(frozen=True)
class TensorSpec:
    """A tensor that is kept for each block: N blocks of equal size are one tensor ``[N, *shape]``.

    Attributes:
        name: Its key in the state, unique among all tensors of a curvature.
        shape: Its shape, without the leading N; `ROWS` is a size that depends on the batch.
        symmetric: Whether it is a symmetric positive semi-definite matrix ``[..., d, d]``. Only its lower triangle is
            stored and sent. A state with another matrix is not loaded if this is a running average.
        at_least_float32: Whether it is stored in at least float32 regardless of `natgrad.Precision`, for tensors that
            are computed from their last value, where rounding errors add up. Vectors and scalars always are.
        nonnegative: Whether its elements are at least 0, such as those of a factor's diagonal. A state with others is
            not loaded if this is a running average.
    """

    name: str
    shape: tuple[int, ...]
    _: KW_ONLY
    symmetric: bool = False
    at_least_float32: bool = False
    nonnegative: bool = False

    def __post_init__(self) -> None:
        require(isinstance(self.name, str) and self.name, "name", self.name, "a name: a string that is not empty")
        whole = isinstance(self.shape, tuple) and all(type(size) is int and size >= 0 for size in self.shape)
        require(whole, "shape", self.shape, "a tuple of whole numbers >= 0")
        _check_flags(self, "symmetric", "at_least_float32", "nonnegative")
        square = len(self.shape) >= 2 and self.shape[-1] == self.shape[-2]
        require(square or not self.symmetric, "shape", self.shape, f"square, as {self.name!r} is symmetric")

    @property
    def numel(self) -> int:
        """The number of elements of one block."""
        return prod(self.shape)

    @property
    def sized_by_batch(self) -> bool:
        """Whether its size depends on the batch."""
        return ROWS in self.shape

    def sized(self, rows: int) -> TensorSpec:
        """Return the spec with `rows` in place of `ROWS`."""
        return replace(self, shape=tuple(rows if size == ROWS else size for size in self.shape))


@with_suggestions
@dataclass(frozen=True)
class Statistic(TensorSpec):
    """A sum over samples (and positions) of all ranks, kept as a bias-corrected running average of its means.

    Attributes:
        source: What it is computed from. Statistics of a layer's inputs alone can have a separate interval
            (`natgrad.Sides`); `Curvature.accumulate` then receives either these or all others.
        per: What the sum is divided by: the number of samples, or of positions of all samples. With
            ``reduction="tokens"`` each position is a sample.
        gradient_power: The degree in the output gradients: 2 for g gᵀ. The loss scale of a ``GradScaler``, known only
            in ``step()``, is divided out to this power.
        combine: How the values of samples and ranks are combined: "sum", or "gather" to keep rows of samples. A
            curvature that gathers has no sums and declares these statistics: A ``(ROWS, d_in)`` of the inputs, G
            ``(ROWS, d_out)`` of the gradients, and, if `Curvature.select` returns Y, Y ``(ROWS, ROWS)`` of both. It has
            one task, which reads them and writes M ``(ROWS, ROWS)``. All of them are kept until the next refresh, with
            the number of "samples" and the "damping" of the last.
        counts_positions: Whether it is a number of positions. Where only some positions count (masked tokens), it is
            reduced in the same proportion as its divisor.
        needs_computed: The results of tasks that `Curvature.accumulate` reads for it, such as eigenvectors. Only ranks
            that hold them can accumulate it.
        used_by_precondition: Whether `Curvature.precondition` reads its current average at each step.
    """

    _: KW_ONLY
    source: Literal["inputs", "gradients", "both"] = "both"
    per: Literal["sample", "position"] = "sample"
    gradient_power: Literal[0, 1, 2] = 0
    combine: Literal["sum", "gather"] = "sum"
    counts_positions: bool = False
    needs_computed: tuple[str, ...] = ()
    used_by_precondition: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_flags(self, "counts_positions", "used_by_precondition")
        _check_names(self, "needs_computed")
        require_one_of("source", self.source, "inputs", "gradients", "both")
        require_one_of("per", self.per, "sample", "position")
        require_one_of("combine", self.combine, "sum", "gather")
        whole = is_whole(self.gradient_power) and 0 <= self.gradient_power <= 2
        require(whole, "gradient_power", self.gradient_power, "0, 1 or 2")
        fits = self.source != "inputs" or self.gradient_power == 0
        require(fits, "gradient_power", self.gradient_power, f"0 for {self.name!r}, a statistic of the inputs alone")


@with_suggestions
@dataclass(frozen=True)
class Task:
    """A part of a refresh that one rank computes for one block, independent of all other tasks: a decomposition.

    Attributes:
        name: Its name among the tasks of a curvature.
        reads: The statistics that it reads.
        writes: The tensors that it computes; kept until its next success.
        cost: Its multiply-adds for one block, up to a factor common to all tasks. Placements balance these costs.
        diagonal_of: The statistics in `reads` of which it needs only the diagonal: it receives ``[N, d]``, in any
            order.
        needs_previous: Whether it starts from its last results (`previous` of `Curvature.compute`).
        restarts: The statistics whose running averages restart when it succeeds, because they were measured with its
            old results.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[TensorSpec, ...]
    cost: float
    _: KW_ONLY
    diagonal_of: tuple[str, ...] = ()
    needs_previous: bool = False
    restarts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(isinstance(self.name, str) and self.name, "name", self.name, "a name: a string that is not empty")
        _check_names(self, "reads", "diagonal_of", "restarts")
        fits = isinstance(self.writes, tuple) and all(isinstance(spec, TensorSpec) for spec in self.writes)
        require(fits, "writes", self.writes, "a tuple of natgrad.TensorSpec")
        fits = isinstance(self.cost, (int, float)) and not isinstance(self.cost, bool) and self.cost >= 0
        require(fits, "cost", self.cost, "a number >= 0")
        _check_flags(self, "needs_previous")


def _check_flags(spec: object, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        require(isinstance(value, bool), name, value, "True or False")


def _check_names(spec: object, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        fits = isinstance(value, tuple) and all(isinstance(part, str) for part in value)
        require(fits, name, value, "a tuple of names")


def check_declarations(
    owner: object, statistics: Sequence[Statistic], tasks: Sequence[Task], state: Sequence[TensorSpec]
) -> None:
    """Check that the declarations of a curvature, the `owner` in error messages, are consistent.

    Raises:
        ValueError: if two tensors or two tasks have the same name, a name is reserved, or a declaration names a tensor
            that is not declared.
    """
    written = [spec.name for task in tasks for spec in task.writes]
    tensors = [*(spec.name for spec in (*statistics, *state)), *written]
    for what, found in (("tensors", tensors), ("tasks", [task.name for task in tasks])):
        require(len(set(found)) == len(found), what, found, f"names that differ, in {owner!r}")
    for name in tensors:
        fits = name not in _RESERVED and not name.startswith("last ")
        require(fits, "name", name, f"another one in {owner!r}: {', '.join(_RESERVED)} and 'last ...' are taken")
    summed = {spec.name for spec in statistics}
    for task in tasks:
        for what, names, known in (
            ("reads", task.reads, summed),
            ("diagonal_of", task.diagonal_of, summed & set(task.reads)),
            ("restarts", task.restarts, summed),
        ):
            allowed = f"some of {sorted(known)} in the task {task.name!r} of {owner!r}"
            require(set(names) <= known, what, names, allowed)
    for statistic in statistics:
        allowed = f"some of {written}, which the tasks of {owner!r} write"
        require(set(statistic.needs_computed) <= set(written), "needs_computed", statistic.needs_computed, allowed)
