"""The contract of a refresh rule.

A rule answers from counters and measured numbers alone. It knows no ranks, tensors or layer types. What it remembers of
each layer is kept for it, sent to the other ranks and saved in checkpoints
(`natgrad.preconditioner.renewal.scheduler`), so that all ranks decide equally.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Any, Literal, TypeAlias, get_args

from natgrad.errors import require, require_one_of
from natgrad.schedule import check_number

# What a statistic is computed from. "gradients" stands for everything that needs a backward pass.
Side: TypeAlias = Literal["inputs", "gradients"]
# What a decomposition reads.
Reads: TypeAlias = Literal["inputs", "gradients", "both"]

SIDES: tuple[Side, ...] = ("inputs", "gradients")
READS: tuple[Reads, ...] = (*SIDES, "both")

Verdict: TypeAlias = Literal["renew", "keep", "stop"]
Measure: TypeAlias = Literal["nothing", "trace", "norm", "drift", "basis"]
By: TypeAlias = Literal["layer", "factor"]

# What is measured of each factor; the other numbers describe the layer that the factors make up.
OF_FACTORS: tuple[Measure, ...] = ("drift", "basis")

INTERVAL = "a number of steps >= 1"
"""What an interval must be, in the words of error messages."""


@dataclass(frozen=True)
class Candidate:
    """A layer, or one of its factors, whose decomposition is due, and what is known of it.

    Attributes:
        layer: The name of its module.
        index: The position of the layer among all that are preconditioned, the same on all ranks.
        statistics: The names of the statistics that would be decomposed, as "A" and "G".
        step: Completed steps.
        value: What was measured (`RefreshRule.measure`); nan where that is not possible.
        last: What `RefreshRule.remember` returned for the layer last; None: nothing yet.
        change: What `RefreshRule.change` makes of both.
        work: The cost of decomposing it, in the unit of ``plan.weights``.
    """

    layer: str
    index: int
    statistics: frozenset[str]
    step: int
    value: float = nan
    last: float | None = None
    change: float = inf
    work: float = 0.0


class RefreshRule:
    """Decides when statistics are captured and when layers are decomposed.

    Every method has a default; a rule that overrides none behaves like ``natgrad.Refresh()``. Override the intervals,
    or `factors_due` and `inverses_due` if intervals are not enough. A rule that also chooses among the layers sets
    `measure` and overrides `verdict` (for a single layer) or `decide` (for all layers that are due together).

    The methods must change nothing and depend only on their arguments and the rule's options, because all ranks call
    them, any number of times, and must get the same answers. The first capture and decomposition are due at once, and a
    failed decomposition at the next decision, whatever the rule returns.

    Example:
        >>> class PowersOfTwo(natgrad.RefreshRule):
        ...     def inverses_due(self, step, last, reads="both"):
        ...         return step & (step - 1) == 0
        >>> preconditioner = natgrad.Preconditioner(model, refresh=PowersOfTwo())

    Attributes:
        measure: What is measured of each layer when decompositions are due. None: all layers are decomposed.
            "nothing": the rule uses the other attributes of a `Candidate`. "trace": the trace of the damped Fisher
            block. "norm": the product of the Frobenius norms of its statistics. "drift": ``‖X - X_last‖ / ‖X_last‖`` of
            each statistic X, where X_last was decomposed last. "basis": ``‖offdiag(Qᵀ X Q)‖ / ‖X‖`` of each factor X
            with eigenvectors Q. The last two are measured for each factor; the value of a layer is the largest. Layers
            that cannot be measured are always decomposed. Measuring waits for the device.
        by: "layer": a layer is decomposed as a whole. "factor": each factor separately, except decompositions that read
            a common statistic; only with "drift", "basis" and "nothing".
        stops: Whether a verdict may be "stop". Rules that stop layers do not work with placement "pipelined".
        share: The share of the training time that preconditioning may take, in (0, 1). None: no limit. If it is used
            up, the layers with the smallest `Candidate.change` wait, and statistics are not captured.
        separate: Whether statistics of inputs and of gradients have different intervals.
    """

    measure: Measure | None = None
    by: By = "layer"
    stops: bool = False
    share: float | None = None
    separate: bool = False

    def __repr__(self) -> str:
        """Show the rule and its options."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    # --- By counters ----------------------------------------------------------------------------------------------

    def factor_interval(self, step: int, side: Side = "gradients") -> float:
        """Return the steps between two captures of the statistics of one side, after `step` completed steps.

        Raises:
            ValueError: if a schedule returns something that is not an interval.
        """
        return 1.0

    def inverse_interval(self, step: int, reads: Reads = "both") -> float:
        """Return the steps between two decompositions of parts that read `reads`, after `step` completed steps.

        Raises:
            ValueError: if a schedule returns something that is not an interval.
        """
        return 10.0

    def intervals(self, step: int) -> dict[str, float]:
        """Return the mean intervals "factors" and "inverses" after `step` completed steps.

        Placement "auto" uses them.

        Raises:
            ValueError: if a schedule returns something that is not an interval.
        """
        return {
            "factors": mean_interval([self.factor_interval(step, side) for side in SIDES]),
            "inverses": mean_interval([self.inverse_interval(step, side) for side in SIDES]),
        }

    def factors_due(self, step: int, last: int | None, side: Side = "gradients") -> bool:
        """Return whether the step after `step` completed ones captures the statistics of one side.

        Args:
            step: Completed steps.
            last: The `step` of the last capture. None: never; then they are captured in any case.
            side: The side.
        """
        return _due(self.factor_interval(step, side), step, last)

    def inverses_due(self, step: int, last: int | None, reads: Reads = "both") -> bool:
        """Return whether the step after `step` completed ones decomposes the parts that read `reads`.

        Args:
            step: Completed steps.
            last: The `step` of the last decomposition. None: never; then they are decomposed in any case.
            reads: The side that the parts read, or "both".
        """
        return _due(self.inverse_interval(step, reads), step, last)

    def check(self, step: int) -> None:
        """Check the intervals of the step after `step` completed ones, before it changes anything.

        Raises:
            ValueError: if the rule, or a schedule of it, returns something that is not an interval.
        """
        name = type(self).__name__
        for side in SIDES:
            value = self.factor_interval(step + 1, side)
            check_number(f"{name}.factor_interval({step + 1}, {side!r})", value, INTERVAL, minimum=1)
        for reads in READS:
            value = self.inverse_interval(step, reads)
            check_number(f"{name}.inverse_interval({step}, {reads!r})", value, INTERVAL, minimum=1)

    def settings(self, step: int) -> object:
        """Return the settings that must be equal on all ranks, as an object whose ``repr`` can be compared."""
        options: dict[str, object] = {}
        for name, value in vars(self).items():
            if isinstance(value, RefreshRule):
                options[name] = value.settings(step)
            elif value is None or isinstance(value, (bool, int, float, str, tuple)):
                options[name] = value
        return type(self).__name__, options, self.intervals(step)

    # --- By measured numbers --------------------------------------------------------------------------------------

    @property
    def criterion(self) -> RefreshRule | None:
        """The rule that chooses among the layers: this one, one that it contains, or None."""
        if self.measure is not None:
            return self
        return None if self.share is None else NORM

    def change(self, value: float, last: float | None) -> float:
        """Return by how much a layer or factor has changed; infinite if unknown.

        By default the value itself for "drift" and "basis", otherwise its change relative to `last`.

        Args:
            value: The measured value.
            last: The last result of `remember`. None: none yet.
        """
        if self.measure in OF_FACTORS:
            return value if isfinite(value) else inf
        return relative(value, last)

    def verdict(self, change: float) -> Verdict:
        """Return whether what has changed so much is decomposed ("renew"), kept until the next decision, or for good.

        A layer that is stopped is neither captured, nor sent, nor decomposed any more.
        """
        return "renew"

    def decide(self, candidates: Sequence[Candidate]) -> Sequence[Verdict]:
        """Return the verdict on each of the candidates that are due in this step; by default by its change alone.

        Where each layer has fewer workers than there are ranks, each rank decides on those that it works for.
        """
        return [self.verdict(candidate.change) for candidate in candidates]

    def remember(self, value: float, last: float | None, *, renewed: bool) -> float | None:
        """Return the number that is kept for a layer until its next decision, also in checkpoints.

        By default a "trace" or "norm" is kept that of the last decomposition.

        Args:
            value: What was measured; of several factors the largest.
            last: What this returned last; None: nothing yet.
            renewed: Whether the layer is decomposed.
        """
        if self.measure in OF_FACTORS:
            return None
        return value if renewed and isfinite(value) else last

    # --- Checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers that belong in checkpoints beside what `remember` returns; by default none.

        For rules that learn something between steps, as the validation loss: the same on all ranks.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; called only where a checkpoint has it."""
        return


class NormRule(RefreshRule):
    """Renew always, and first the layers whose norm has changed most since their last decomposition.

    A cap on time goes by it where there is no other criterion. By the triangle inequality the relative change of the
    product of norms is a lower bound of that of a Kronecker product. It takes one number of memory a layer.
    """

    measure = "norm"


NORM = NormRule()


def relative(value: float, last: float | None) -> float:
    """Return ``|value - last| / |last|``; infinite where there is nothing to compare, or a number is not finite."""
    if last is None or last == 0 or not (isfinite(value) and isfinite(last)):
        return inf
    return abs(value - last) / abs(last)


def mean_interval(intervals: Sequence[float]) -> float:
    """Return the interval at which as much would be done as at several, if each cost the same."""
    if len(set(intervals)) == 1:
        return float(intervals[0])
    return len(intervals) / sum(1 / interval for interval in intervals)


def side_of(names: Collection[str], inputs: Collection[str]) -> Reads:
    """Return which side some statistics are of, where those named `inputs` need no gradient."""
    if names and all(name in inputs for name in names):
        return "inputs"
    return "both" if any(name in inputs for name in names) else "gradients"


def check_by(name: str, by: object, criterion: RefreshRule) -> None:
    """Check that a criterion can decide by "layer" or by "factor".

    Raises:
        ValueError: if `by` is neither of these, or "factor" where a whole layer is measured.
    """
    require_one_of(name, by, *get_args(By))
    fits = by == "layer" or criterion.measure in (*OF_FACTORS, "nothing")
    require(fits, name, by, f"'layer' with {criterion!r}, which measures no factor by itself")


def _due(interval: float, step: int, last: int | None) -> bool:
    return last is None or step - last >= interval
