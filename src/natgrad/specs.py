"""What a curvature declares: the tensors that are summed, stored, sent and checkpointed, and the work between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from math import prod
from typing import Literal

from natgrad.errors import require, require_one_of

ROWS = 0
"""In the shape of a `TensorSpec`: as many as the rows that were selected of the last batch; 0 before the first."""

# What checkpoints keep of a layer beside the tensors of its curvature.
_RESERVED = ("weight", "early weight", "renewed", "norm", "ladder", "rule")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that is kept for each block: N blocks of equal size are one tensor ``[N, *shape]``.

    Attributes:
        name: Its key in the state, unique among all tensors of a curvature.
        shape: Its shape, without the leading N; `ROWS` stands for a size that the batch decides.
        symmetric: Whether it is a symmetric positive semi-definite matrix ``[..., d, d]``. Only its lower triangle is
            kept and sent, and only its diagonal is searched for numbers that are not finite.
        at_least_float32: Whether it is kept in at least float32 whatever `natgrad.Precision` says, since rounding adds
            up where a tensor is computed from its own last value. Vectors and numbers always are.
    """

    name: str
    shape: tuple[int, ...]
    _: KW_ONLY
    symmetric: bool = False
    at_least_float32: bool = False

    def __post_init__(self) -> None:
        """Check the shape.

        Raises:
            ValueError: if it is not allowed.
        """
        square = len(self.shape) >= 2 and self.shape[-1] == self.shape[-2]
        require(square or not self.symmetric, "shape", self.shape, f"square, as {self.name!r} is symmetric")

    @property
    def numel(self) -> int:
        """The number of elements of one block."""
        return prod(self.shape)

    @property
    def sized_by_batch(self) -> bool:
        """Whether the batch decides over its size."""
        return ROWS in self.shape

    def sized(self, rows: int) -> TensorSpec:
        """Return the spec of this tensor with so many rows."""
        return TensorSpec(
            self.name,
            tuple(rows if size == ROWS else size for size in self.shape),
            symmetric=self.symmetric,
            at_least_float32=self.at_least_float32,
        )


@dataclass(frozen=True)
class Statistic(TensorSpec):
    """A sum over samples (and positions) of all ranks, kept as a bias-corrected running average of its means.

    Attributes:
        source: What it is computed from. Statistics of a layer's inputs alone can have an interval of their own
            (`natgrad.Sides`); `Curvature.accumulate` is then given either these or all others.
        per: What the sum is divided by: the number of samples, or of positions of all samples. With
            ``reduction="tokens"`` each position is a sample.
        gradient_power: How often the output gradients enter as factors: 2 for g gᵀ. The loss scale of a ``GradScaler``,
            which is known only in ``step()``, is divided out as often.
        decayed: Whether a running average is kept; otherwise the mean of the last batch.
        combine: How the values of samples and ranks are combined: "sum", or "gather" where rows of samples are kept.
            A curvature that gathers sums nothing, and declares these statistics: A ``(ROWS, d_in)`` of the inputs, G
            ``(ROWS, d_out)`` of the gradients, and, where `Curvature.select` links the selected rows to those left out,
            Y ``(ROWS, ROWS)`` of both. It has one task, which reads them and writes M ``(ROWS, ROWS)``. All of it is
            held until the next renewal, with the number of "samples" and the "damping" of this one.
        counts_positions: Whether it is a number of positions. Where only some positions count (masked tokens), it is
            reduced by the same share as the number that it is divided by.
        needs_computed: The results of tasks that `Curvature.accumulate` reads for it, such as eigenvectors. Only ranks
            that hold them can accumulate it.
        used_by_precondition: Whether `Curvature.precondition` reads its average, as it is at each step.
        replayed: Whether the second pass over a batch, after the optimizer's step, accumulates it again
            (`Curvature.replay_summary`).
    """

    _: KW_ONLY
    source: Literal["inputs", "gradients", "both"] = "both"
    per: Literal["sample", "position"] = "sample"
    gradient_power: Literal[0, 1, 2] = 0
    decayed: bool = True
    combine: Literal["sum", "gather"] = "sum"
    counts_positions: bool = False
    needs_computed: tuple[str, ...] = ()
    used_by_precondition: bool = False
    replayed: bool = False

    def __post_init__(self) -> None:
        """Check what decides over scale and interval, too.

        Raises:
            ValueError: if a value is not allowed.
        """
        super().__post_init__()
        require_one_of("source", self.source, "inputs", "gradients", "both")
        require_one_of("per", self.per, "sample", "position")
        require_one_of("combine", self.combine, "sum", "gather")
        whole = isinstance(self.gradient_power, int) and 0 <= self.gradient_power <= 2
        require(whole, "gradient_power", self.gradient_power, "0, 1 or 2")
        fits = self.source != "inputs" or self.gradient_power == 0
        require(fits, "gradient_power", self.gradient_power, f"0 for {self.name!r}, a statistic of the inputs alone")


@dataclass(frozen=True)
class Task:
    """Work of a renewal that one rank can do for one block, independently of all other tasks: a decomposition.

    Attributes:
        name: Its name among the tasks of a curvature.
        reads: The statistics, and the tensors of the state, that it reads.
        writes: What it computes; kept until it has succeeded again.
        cost: Its work in multiply-adds for one block, up to a factor common to all tasks. Placements balance by it.
        diagonal_of: Which of the statistics in `reads` it needs only the diagonal of; of these it is given ``[N, d]``,
            in any order.
        needs_previous: Whether it starts from what it wrote last (`previous` of `Curvature.compute`).
        restarts: The statistics whose running averages start again when it has succeeded, since they were measured with
            what it wrote before.
        on_every_worker: Whether every rank that preconditions the block does it for itself, without communication:
            right where the results are larger than the work.
        after_replay: Whether it is repeated after each second pass (`Curvature.replay_update`) and not by renewals,
            which only do it the first time.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[TensorSpec, ...]
    cost: float
    _: KW_ONLY
    diagonal_of: tuple[str, ...] = ()
    needs_previous: bool = False
    restarts: tuple[str, ...] = ()
    on_every_worker: bool = False
    after_replay: bool = False


def check_declarations(
    owner: object, statistics: Sequence[Statistic], tasks: Sequence[Task], state: Sequence[TensorSpec]
) -> None:
    """Check that what a curvature declares fits together.

    Args:
        owner: The curvature, for the error message.
        statistics: Its statistics.
        tasks: Its tasks.
        state: Its state.

    Raises:
        ValueError: if two tensors or two tasks have one name, a name is reserved, or something names a tensor that is
            not declared.
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
            ("reads", task.reads, summed | {spec.name for spec in state}),
            ("diagonal_of", task.diagonal_of, summed & set(task.reads)),
            ("restarts", task.restarts, summed),
        ):
            allowed = f"some of {sorted(known)} in the task {task.name!r} of {owner!r}"
            require(set(names) <= known, what, names, allowed)
    for statistic in statistics:
        allowed = f"some of {written}, which the tasks of {owner!r} write"
        require(set(statistic.needs_computed) <= set(written), "needs_computed", statistic.needs_computed, allowed)
