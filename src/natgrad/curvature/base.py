"""The base class of curvatures: the tensors that a curvature declares, and its mathematics on batches of equal blocks.

A curvature declares statistics, which are summed over samples and ranks, and tasks, which compute from their running
averages the tensors that preconditioning reads. Placements decide which rank runs which task. All tensors have a
leading dimension N: blocks of equal size are stored as one tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from natgrad.curvature import kernel
from natgrad.curvature.likelihood import Likelihood, resolve
from natgrad.errors import NatgradError, require, require_one_of
from natgrad.layers import DenseRows, Layer, Rows
from natgrad.schedule import is_number
from natgrad.specs import ROWS, Statistic, Task, Tensors, TensorSpec, check_declarations


class Training(Protocol):
    """The training progress that a selection of rows may depend on.

    Attributes:
        epoch: The number of epochs that have ended.
    """

    epoch: int

    def critical(self, threshold: float, least_decay: float) -> bool:
        """Return whether gradients change fast in this epoch, or a learning rate has decayed at its start."""


class Curvature(ABC):
    """An approximation of the Fisher block of a layer, and how it preconditions the layer's gradient.

    A subclass implements `statistics`, `tasks`, `accumulate`, `compute` and `precondition`. The rest has defaults. A
    subclass that implements `trace` also names the statistics that it reads; otherwise it is not available.

    Attributes:
        factor_decay: The weight of the old value in running averages, in [0, 1).
        likelihood: The distribution that labels are sampled from, or None for the true labels (empirical Fisher).
        sum_positions: Whether gradients are summed and inputs averaged over positions, and over all uses of the layer
            in one backward pass, before `accumulate` ("reduce": Eschenhagen 2023).
        default_damping: The preconditioner's damping if the user sets none, also for norm layers.
        positive_definite: Whether ⟨V, W⟩ ≥ 0 for every gradient W and its preconditioned gradient V. A violation is
            then treated as a numerical failure.
        is_normalized: Whether the norm of the preconditioned gradient is independent of that of the gradient. The KL
            clip does not apply then.
        needs_results: Whether a layer keeps its plain gradient as long as its tasks have no results. Otherwise
            `precondition` is called without computed tensors, and the state is kept when results of another form are
            loaded.
        covers_bias: Whether it preconditions a layer's bias with the weight, as the last column. Otherwise the bias is
            left to the optimizer.
        takes_narrow: Whether `precondition` accepts computed tensors of a narrower dtype than the gradient's
            (`natgrad.Precision.solve`); otherwise they are converted to the gradient's dtype first.
        takes_narrow_rows: Whether `accumulate` gets rows in the dtype of the layer's inputs and output gradients, such
            as float16 under autocast, in which squares overflow. Otherwise they are in at least float32.
        trace_reads: The statistics that `trace` reads; None: not available.
    """

    factor_decay: float = 0.95
    likelihood: Likelihood | None = None
    sum_positions: bool = False
    default_damping: float = 1e-3
    positive_definite: bool = True
    is_normalized: bool = False
    needs_results: bool = True
    covers_bias: bool = True
    takes_narrow: bool = False
    takes_narrow_rows: bool = False
    trace_reads: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def variant_for(self, layer: Layer) -> Curvature | str | None:
        """Return the variant of this curvature for `layer`, or the reason why there is none.

        Layers with the same requirements get the same object. None, for norm layers, stands for a `UnitWise` with the
        same Fisher.
        """
        if any(other.form != layer.form for other in layer.others):
            return f"{self!r} has no form for an embedding tied with a linear layer"
        if layer.form == "elementwise":
            return None
        return self if layer.form == "matrix" else f"{self!r} has no form for {type(layer.module).__name__}"

    @abstractmethod
    def statistics(self, d_out: int, d_in: int) -> tuple[Statistic, ...]:
        """Return the statistics of a block ``[d_out, d_in]``; may be empty."""

    @abstractmethod
    def tasks(self, d_out: int, d_in: int) -> tuple[Task, ...]:
        """Return the tasks of a refresh for a block ``[d_out, d_in]``; may be empty."""

    def state(self, d_out: int, d_in: int) -> tuple[TensorSpec, ...]:
        """Return the other tensors that are kept from step to step; they start at zero."""
        return ()

    @abstractmethod
    def accumulate(
        self, sums: Tensors, inputs: Rows, gradients: Rows, scale: float, computed: Tensors | None = None
    ) -> None:
        """Add one use of a layer to the sums, in place; called by a gradient hook during the backward pass.

        Args:
            sums: A tensor ``[n, *shape]`` for each statistic that is due, in at least float32, zero before the first
                use in a step. Only the lower triangle of symmetric matrices is read. If the statistics of inputs have
                a separate interval, either these or all others may be missing.
            inputs: The rows a ``[n, B, T, d_in]``; B is the number of terms of the loss.
            gradients: The rows g ``[n, B, T, d_out]`` of the same samples, times ``1 / scale``.
            scale: Multiply each factor of `gradients` by it to get gradients of per-sample losses. (Loss scale and
                accumulated passes are divided out later: see `Statistic.gradient_power`.)
            computed: The tensors ``[n, *shape]`` in `Statistic.needs_computed`; None before the first refresh, and if
                there are none.
        """

    @abstractmethod
    def compute(
        self, task: str, averages: Tensors, damping: float, previous: Tensors | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Compute a task for some blocks.

        Args:
            task: The name of the task.
            averages: The running averages ``[N, *shape]`` that the task reads, bias-corrected and as full matrices
                (diagonals for `Task.diagonal_of`). They may be changed in place.
            damping: γ at this refresh.
            previous: The last results of the task ``[N, *shape]``, not to be changed; None before its first success,
                and without `Task.needs_previous`.

        Returns:
            By name, each tensor that the task writes ``[N, *shape]``, and whether each block succeeded ``[N]`` (bool).
            A block that fails keeps its last results.
        """

    @abstractmethod
    def precondition(
        self, computed: Tensors, averages: Tensors, state: Tensors, gradient: Tensor, damping: float
    ) -> Tensor:
        """Return the preconditioned gradient ``[N, d_out, d_in]``.

        Args:
            computed: The results of all tasks ``[N, *shape]``.
            averages: The bias-corrected averages of the statistics with `Statistic.used_by_precondition`.
            state: The state, after `update_state`.
            gradient: ``[N, d_out, d_in]``, in at least float32. No argument may be changed.
            damping: γ of this step.
        """

    def is_bfloat16(self, d_out: int, d_in: int, device: torch.device) -> bool:
        """Return whether `precondition` computes a block in bfloat16; workers then send its result in bfloat16."""
        return False

    def step_cost(self, d_out: int, d_in: int) -> float:
        """Return the multiply-adds of `precondition` for a block; by default those of a product from each side."""
        return float(d_out * d_in * (d_out + d_in))

    def rows_per_rank(self, samples: float, most: int, ranks: int) -> int:
        """Return how many rows each rank selects if statistics are gathered; by default all.

        Args:
            samples: S, the number of samples of all ranks.
            most: The largest number of rows of any rank.
            ranks: P, the number of ranks.
        """
        return most

    def select(
        self, A: Tensor, G: Tensor, count: int, training: Training, *, samples: float, damping: float, starts: Tensor
    ) -> kernel.Selection:
        """Select rows of this rank before they are gathered; by default all.

        Args:
            A: All input rows of this rank ``[N, m, i]``.
            G: Their gradient rows ``[N, m, o]``, of per-sample losses.
            count: The number of rows to select.
            training: The training progress.
            samples: S, the number of samples of all ranks.
            damping: α of this refresh.
            starts: A random number in [0, 1) for each block ``[N]``.
        """
        return kernel.every(A, G, count)

    def update_state(self, state: Tensors, gradient: Tensor) -> Tensors:
        """Return the new values of some of `state` ``[N, *shape]`` for this step's gradient, before it is used.

        Blocks whose gradient is not finite keep their state.

        Args:
            state: The state, not to be changed.
            gradient: ``[N, d_out, d_in]``.
        """
        return {}

    def trace(self, averages: Tensors, d_out: int) -> Tensor:
        """Return the trace of each approximated Fisher block ``[N]``, without damping.

        Args:
            averages: The averages that `trace_reads` names ``[N, *shape]``, bias-corrected.
            d_out: The number of outputs.
        """
        raise NotImplementedError


class Sums(dict[str, Tensor]):
    """The sums that `Curvature.accumulate` adds to."""

    def __missing__(self, name: str) -> Tensor:
        raise NatgradError(
            f"accumulate() reads sums[{name!r}], but statistics() declares none of this name, or it is not due: "
            f"there are {', '.join(self)} now, and with separate intervals not all are there at once",
            "your-own-code",
        )


def input_statistics(curvature: Curvature, statistics: Iterable[Statistic]) -> tuple[str, ...]:
    """Return the names of the statistics of inputs alone, which can have a separate interval.

    With `Curvature.sum_positions` there are none: the average over positions needs the gradients of the same samples.
    """
    candidates = () if curvature.sum_positions else statistics
    return tuple(statistic.name for statistic in candidates if statistic.source == "inputs")


def computed_for(statistics: Iterable[Statistic]) -> tuple[str, ...]:
    """Return the names of the computed tensors that `Curvature.accumulate` reads."""
    return tuple(dict.fromkeys(name for statistic in statistics for name in statistic.needs_computed))


def declarations(
    curvature: Curvature, d_out: int, d_in: int
) -> tuple[tuple[Statistic, ...], tuple[Task, ...], tuple[TensorSpec, ...]]:
    """Return the statistics, tasks and state of a curvature for a block ``[d_out, d_in]``.

    A layer's tasks run after its first backward pass, and it is preconditioned once they have succeeded. So a curvature
    without statistics or tasks gets an empty one.

    Raises:
        ValueError: if they are inconsistent.
    """
    statistics, tasks = curvature.statistics(d_out, d_in), curvature.tasks(d_out, d_in)
    state = curvature.state(d_out, d_in)
    declared: tuple[tuple[str, object, type], ...] = (
        ("statistics()", statistics, Statistic),
        ("tasks()", tasks, Task),
        ("state()", state, TensorSpec),
    )
    for method, found, kind in declared:
        fits = isinstance(found, Sequence) and all(isinstance(one, kind) for one in found)
        require(fits, method, found, f"a tuple of natgrad.{kind.__name__} in {curvature!r}")
    statistics = statistics or (Statistic("seen", (1,)),)
    tasks = tasks or (Task("ready", tuple(statistic.name for statistic in statistics), (), 1.0),)
    check_declarations(curvature, statistics, tasks, state)
    if curvature.trace_reads is not None:
        known, reads = {spec.name for spec in statistics}, curvature.trace_reads
        allowed = f"some of {sorted(known)}, or None without a method trace, in {curvature!r}"
        fits = set(reads) <= known and type(curvature).trace is not Curvature.trace
        require(fits, "trace_reads", reads, allowed)
    if gathered(statistics):
        _check_gathered(curvature, statistics, tasks, d_out, d_in)
    else:
        written = [spec for task in tasks for spec in task.writes]
        sized = [spec.name for spec in (*statistics, *written, *state) if spec.sized_by_batch]
        require(not sized, "shape", sized, f"fixed, as nothing is gathered, in {curvature!r}")
    return statistics, tasks, state


def check_sums(
    curvature: Curvature, statistics: Sequence[Statistic], tasks: Sequence[Task], d_out: int, d_in: int
) -> None:
    """Check which sums `Curvature.accumulate` adds to for a matrix, by a call on the meta device: it computes nothing.

    Raises:
        NatgradError: if it adds to one that is not declared.
    """
    with torch.device("meta"):
        sums = Sums({spec.name: torch.zeros(1, *spec.shape) for spec in statistics})
        computed = {spec.name: torch.zeros(1, *spec.shape) for task in tasks for spec in task.writes}
        inputs, gradients = DenseRows(torch.zeros(1, 1, 1, d_in)), DenseRows(torch.zeros(1, 1, 1, d_out))
    try:
        with torch.no_grad():
            curvature.accumulate(sums, inputs, gradients, 1.0, computed)
    except NatgradError:
        raise
    except Exception:  # other rows, or values that the meta device has not: the first backward pass decides
        return


def _check_gathered(
    curvature: Curvature, statistics: Sequence[Statistic], tasks: Sequence[Task], d_out: int, d_in: int
) -> None:
    """Check that gathered statistics have the form described at `Statistic.combine`.

    Raises:
        ValueError: if they are not.
    """
    found = {spec.name: (spec.shape, spec.source, spec.gradient_power) for spec in gathered(statistics)}
    wanted = {"A": ((ROWS, d_in), "inputs", 0), "G": ((ROWS, d_out), "gradients", 1)}
    links = {"Y": ((ROWS, ROWS), "both", 0)} if "Y" in found else {}
    fits = len(found) == len(statistics) and found == {**wanted, **links}
    allowed = f"A (ROWS, d_in), G (ROWS, d_out) of gradient_power 1, perhaps Y (ROWS, ROWS), alone in {curvature!r}"
    require(fits, "gathered statistics", found, allowed)
    written = [(task.name, spec.name, spec.shape) for task in tasks for spec in task.writes]
    fits = written == [("M", "M", (ROWS, ROWS))] and len(tasks) == 1 and set(tasks[0].reads) == found.keys()
    require(fits, "tasks", tasks, f"one, M, that reads all and writes M (ROWS, ROWS), in {curvature!r}")
    require(curvature.sum_positions, "sum_positions", False, f"True where rows are gathered, in {curvature!r}")


def summed(statistics: Iterable[Statistic]) -> tuple[Statistic, ...]:
    """Return the statistics that are summed over samples and ranks."""
    return tuple(statistic for statistic in statistics if statistic.combine == "sum")


def gathered(statistics: Iterable[Statistic]) -> tuple[Statistic, ...]:
    """Return the statistics whose rows are gathered."""
    return tuple(statistic for statistic in statistics if statistic.combine == "gather")


def statistics_of(curvature: Curvature, layer: Layer) -> tuple[Statistic, ...]:
    """Return the statistics of a curvature for the blocks of a layer."""
    return curvature.statistics(layer.outputs, layer.inputs)


def check_estimate(
    fisher: object, factor_decay: object, likelihood: str | Likelihood | None
) -> tuple[float, Likelihood | None]:
    """Check the arguments common to all curvatures, and return `factor_decay` and the likelihood.

    Raises:
        ValueError: if one of them is not allowed.
    """
    require_one_of("fisher", fisher, "empirical", "sampled")
    require(is_number(factor_decay) and 0 <= factor_decay < 1, "factor_decay", factor_decay, "a number in [0, 1)")
    require(
        (likelihood is not None) == (fisher == "sampled"),
        "likelihood",
        likelihood,
        "given with fisher='sampled' ('categorical', 'bernoulli', 'gaussian') and left out otherwise",
    )
    return float(factor_decay), None if likelihood is None else resolve(likelihood)  # type: ignore[arg-type]
