"""Curvatures that store rows of samples instead of sums over samples: SNGD and HyLo (Mu 2022)."""

from __future__ import annotations

from math import ceil, inf
from random import Random
from typing import Literal, NoReturn

from torch import Tensor
from typing_extensions import override

from natgrad.curvature import kernel
from natgrad.curvature.base import Curvature, Training, check_estimate
from natgrad.curvature.likelihood import Likelihood
from natgrad.errors import require, require_one_of, warn, with_suggestions
from natgrad.printed import changed
from natgrad.schedule import check_number, check_whole, is_number
from natgrad.specs import ROWS, Statistic, Task, Tensors, TensorSpec

# The number of rows assumed in the costs of tasks, because the batch is not known yet.
_NOMINAL_ROWS = 256
# For the running averages of norm layers.
_DECAY = 0.95

# The largest number of rows, of a rank or selected. A kernel of as many has 1 GiB in float32, and takes minutes.
_MOST_ROWS = 2**14

THRESHOLD = 0.5
"""Default η of HyLo, from Accordion, which the paper cites; the paper has no value."""

LEAST_DECAY = 0.2
"""Default of the least decay that HyLo's switch counts.

In the paper any decay counts, but its rates are constant between a few decays. Such decays are of a quarter or more in
common schedules. A cosine falls by a fifth from one epoch to the next in its last eight epochs only, a linear schedule
in its last four.
"""

EPOCH_GRADIENT = "epoch gradient"
"""The name of the state tensor ``[d_out * d_in]`` that holds the sum of the gradients of an epoch."""


class _RowCurvature(Curvature):
    """``F = UᵀU / S`` of rows ``g_n ⊗ a_n``, with several positions ``(Σ_t g_t) ⊗ (mean_t a_t)``.

    In steps in which inverses are due, each rank selects rows of its batch (`select`), and one rank computes ``M`` from
    the rows of all ranks. All gradient workers use these rows, M and the damping of this refresh until the next.

    It needs more damping than K-FAC: ``(F + αI)⁻¹`` multiplies the part of a gradient outside the span of the rows by
    1/α. Between two refreshes that is most of the gradient.
    """

    takes_narrow = True
    sum_positions = True
    default_damping = 0.1

    @with_suggestions
    def __init__(
        self, *, fisher: Literal["empirical", "sampled"] = "empirical", likelihood: str | Likelihood | None = None
    ) -> None:
        """Choose the variant.

        Args:
            fisher: "empirical": g from the true labels. "sampled": g from labels drawn from the model's own
                prediction, in one more backward pass; use ``preconditioner.backward(loss, outputs)``.
            likelihood: For the sampled Fisher: "categorical", "bernoulli", "gaussian" or a `Likelihood`.

        Raises:
            ValueError: if an argument is not allowed.
        """
        self.fisher = fisher
        # The decay is for norm layers: rows have no running average.
        self.factor_decay, self.likelihood = check_estimate(fisher, _DECAY, likelihood)

    @override
    def statistics(self, d_out: int, d_in: int) -> tuple[Statistic, ...]:
        return (
            Statistic("A", (ROWS, d_in), source="inputs", combine="gather"),
            Statistic("G", (ROWS, d_out), source="gradients", gradient_power=1, combine="gather"),
        )

    @override
    def tasks(self, d_out: int, d_in: int) -> tuple[Task, ...]:
        # `precondition` multiplies rounding errors of M by the largest eigenvalue over α.
        M = TensorSpec("M", (ROWS, ROWS), at_least_float32=True)
        reads, rows = tuple(spec.name for spec in self.statistics(d_out, d_in)), self.nominal_rows
        return (Task("M", reads, (M,), float(rows * rows * (d_out + d_in) + rows**3)),)

    @property
    def nominal_rows(self) -> int:
        """About how many rows there are."""
        return _NOMINAL_ROWS

    @override
    def accumulate(self, *args: object, **options: object) -> NoReturn:
        raise AssertionError("rows are gathered, not summed")

    @override
    def rows_per_rank(self, samples: float, most: int, ranks: int) -> int:
        """Return how many rows each rank selects.

        Raises:
            ValueError: There are too many rows.
        """
        selected = self.selected_rows(samples, most, ranks)
        rows = max(most, selected * ranks)
        allowed = (
            f"at most {_MOST_ROWS} a step: if the loss is a mean over pixels or tokens, each of them is a sample with "
            "a row, and K-FAC, which has no rows, suits it better"
        )
        require(rows <= _MOST_ROWS, f"rows of {type(self).__name__}", rows, allowed)
        return selected

    def selected_rows(self, samples: float, most: int, ranks: int) -> int:
        """Return how many rows each rank selects, of at most `most`."""
        return most

    @override
    def compute(
        self, task: str, averages: Tensors, damping: float, previous: Tensors | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        samples = averages["samples"]
        M, fine = kernel.inverted(averages["A"], averages["G"], averages.get("Y"), samples=samples, damping=damping)
        return {"M": M}, fine

    def precondition(
        self, computed: Tensors, averages: Tensors, state: Tensors, gradient: Tensor, damping: float
    ) -> Tensor:
        """Precondition with the damping of the last refresh."""
        A, G, M = (computed[name].to(gradient.dtype) for name in ("A", "G", "M"))
        samples, alpha = (computed[name].to(gradient.dtype)[:, None, None] for name in ("samples", "damping"))
        return kernel.precondition(A, G, M, gradient, samples=samples, damping=alpha)


class SNGD(_RowCurvature):
    """Sherman-Morrison-Woodbury natural gradient: (F + αI)⁻¹ exactly, of all rows of the global batch (Mu 2022, eq. 7).

    The kernel has one row and column per sample of the global batch: use it for batches of at most a few thousand.

    The default damping is 0.1, because the part of a gradient outside the span of the rows is multiplied by 1/α.
    """

    def __repr__(self) -> str:
        return f"SNGD({', '.join([f'fisher={self.fisher!r}', *changed(self, SNGD, 'likelihood')])})"


class HyLo(_RowCurvature):
    """Hybrid low-rank natural gradient (Mu 2022): a few rows represent the global batch.

    *KID* approximates each rank's kernel by some of its rows and a residual; it is near the exact natural gradient if
    there are more rows than the kernel's rank. *KIS* draws rows by their norms, which is much cheaper.

    The default damping is 0.1, because the part of a gradient outside the span of the rows is multiplied by 1/α.
    """

    @with_suggestions
    def __init__(
        self,
        rank: float = 0.1,
        threshold: float = THRESHOLD,
        method: Literal["switch", "kid", "kis", "random"] = "switch",
        *,
        fisher: Literal["empirical", "sampled"] = "empirical",
        likelihood: str | Likelihood | None = None,
        least_decay: float = LEAST_DECAY,
        kid_fraction: float = 0.5,
        seed: int = 0,
    ) -> None:
        """Choose the variant.

        Args:
            rank: r, a fraction of the global batch in (0, 1], or (int) a number of its rows; each of P ranks selects
                ceil(r / P). 1.0 selects all rows; 1 selects a single one, with a warning.
            threshold: η >= 0, the relative change of the gradient's norm that makes an epoch critical.
            method: "kid"; "kis"; "switch": KID in critical epochs, otherwise KIS; or "random": KID in a random share of
                the epochs (table III). Critical epochs are the first two, those at whose first step a learning rate
                has decayed since that of the previous epoch, and e ≥ 2 with
                |‖Δ_{e-1}‖ - ‖Δ_{e-2}‖| ≥ η ‖Δ_{e-2}‖, where Δ is the gradient summed over an epoch. Call
                ``preconditioner.next_epoch()`` at the end of each epoch: without it all steps belong to the first.
            fisher: "empirical": g from the true labels. "sampled": g from labels drawn from the model's own
                prediction, in one more backward pass; use ``preconditioner.backward(loss, outputs)``.
            likelihood: For the sampled Fisher: "categorical", "bernoulli", "gaussian" or a `Likelihood`.
            least_decay: The least fall of a learning rate, relative to the previous epoch's, that is a decay. 0: any
                fall, as in the paper; then all epochs of a cosine schedule are critical.
            kid_fraction: With "random", the probability of KID in each epoch.
            seed: With "random", what KID is drawn from together with the epoch. It must be equal on all ranks.

        Raises:
            ValueError: if an argument is not allowed.
        """
        number = isinstance(rank, (int, float)) and not isinstance(rank, bool)
        fits = number and (rank >= 1 if isinstance(rank, int) else 0 < rank <= 1)
        require(fits, "rank", rank, "a fraction of the global batch in (0, 1], or a whole number of its rows >= 1")
        number = is_number(threshold) or (isinstance(threshold, float) and threshold == inf)
        require(number and threshold >= 0, "threshold", threshold, "a number >= 0")
        check_number("least_decay", least_decay, "a number >= 0", minimum=0)
        check_number("kid_fraction", kid_fraction, "a number from 0 to 1", minimum=0)
        require(kid_fraction <= 1, "kid_fraction", kid_fraction, "a number from 0 to 1")
        check_whole("seed", seed, 0)
        require_one_of("method", method, "switch", "kid", "kis", "random")
        super().__init__(fisher=fisher, likelihood=likelihood)
        self.rank, self.threshold, self.method = rank, float(threshold), method
        self.least_decay, self.kid_fraction, self.seed = float(least_decay), float(kid_fraction), seed
        if isinstance(rank, int) and rank == 1:
            message = (
                "natgrad: HyLo(rank=1) keeps one row of the global batch: rank=1.0 keeps all rows, rank=0.1 a tenth"
            )
            warn(message, "one-row")

    def __repr__(self) -> str:
        options = {
            "switch": f", threshold={self.threshold!r}, least_decay={self.least_decay!r}",
            "random": f", kid_fraction={self.kid_fraction!r}, seed={self.seed!r}",
        }
        used = options.get(self.method, "")
        shown = [f"rank={self.rank!r}, method={self.method!r}{used}, fisher={self.fisher!r}"]
        return f"HyLo({', '.join([*shown, *changed(self, HyLo, 'likelihood')])})"

    @property
    @override
    def nominal_rows(self) -> int:
        return self.rank if isinstance(self.rank, int) else _NOMINAL_ROWS

    @override
    def statistics(self, d_out: int, d_in: int) -> tuple[Statistic, ...]:
        # Y needs the dtype of M, which is computed from it.
        Y = Statistic("Y", (ROWS, ROWS), combine="gather", at_least_float32=True)
        return (*super().statistics(d_out, d_in), *(() if self.method == "kis" else (Y,)))

    @override
    def state(self, d_out: int, d_in: int) -> tuple[TensorSpec, ...]:
        return (TensorSpec(EPOCH_GRADIENT, (d_out * d_in,)),) if self.method == "switch" else ()

    @override
    def selected_rows(self, samples: float, most: int, ranks: int) -> int:
        # 1e-9, because 0.1 * 30 > 3 in floating point.
        rows = self.rank if isinstance(self.rank, int) else ceil(self.rank * samples - 1e-9)
        return min(most, ceil(rows / ranks))

    @override
    def select(
        self, A: Tensor, G: Tensor, count: int, training: Training, *, samples: float, damping: float, starts: Tensor
    ) -> kernel.Selection:
        if self.uses_kid(training):
            return kernel.interpolate(A, G, count, samples=samples, damping=damping)
        return kernel.sample(A, G, count, starts=starts)

    def uses_kid(self, training: Training) -> bool:
        """Return whether rows are selected by KID; the answer is the same in all steps of an epoch, on all ranks."""
        if self.method == "switch":
            return training.critical(self.threshold, self.least_decay)
        if self.method == "random":
            return Random(f"HyLo {self.seed} {training.epoch}").random() < self.kid_fraction
        return self.method == "kid"
