"""The interface of refresh rules.

A rule decides by counters and measured numbers only. The number that it remembers for each layer is stored outside of
the rule (`natgrad.preconditioner.refresh.scheduler`), sent to the other ranks and saved in checkpoints, so that all
ranks decide equally.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Any, Literal, TypeAlias, get_args

from natgrad.errors import require, require_one_of
from natgrad.schedule import check_number

# The source of a statistic. "gradients": every source that needs a backward pass.
Side: TypeAlias = Literal["inputs", "gradients"]
# The sources of the statistics that a decomposition reads.
Reads: TypeAlias = Literal["inputs", "gradients", "both"]

SIDES: tuple[Side, ...] = ("inputs", "gradients")
READS: tuple[Reads, ...] = (*SIDES, "both")

Verdict: TypeAlias = Literal["renew", "keep", "stop"]
Measure: TypeAlias = Literal["nothing", "trace", "norm", "drift", "basis"]
By: TypeAlias = Literal["layer", "factor"]

# Measures of single factors. The others are measures of whole layers.
OF_FACTORS: tuple[Measure, ...] = ("drift", "basis")

INTERVAL = "a number of steps >= 1"
"""The allowed values of intervals, for error messages."""


@dataclass(frozen=True)
class Candidate:
    """A layer, or one of its factors, whose decomposition is due.

    Attributes:
        layer: The name of its module.
        index: The position of the layer among all preconditioned layers, equal on all ranks.
        statistics: The names of the statistics that would be decomposed, such as "A" and "G".
        step: The number of completed steps.
        value: The measured number (`RefreshRule.measure`); nan if it is not available.
        last: The last result of `RefreshRule.remember` for the layer. None: there is none.
        change: The result of `RefreshRule.change` for `value` and `last`.
        work: The cost of the decomposition, in the unit of ``plan.weights``.
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
        """Return the mean intervals "factors" and "inverses" after `step` completed steps, for the balance of "dp".

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
        """Return the verdict on a layer or factor with this `change`.

        "renew": it is decomposed. "keep": it is not, until the next decision. "stop": it is no longer captured, sent or
        decomposed.
        """
        return "renew"

    def decide(self, candidates: Sequence[Candidate]) -> Sequence[Verdict]:
        """Return the verdict on each candidate that is due in this step; by default `verdict` of its change.

        If layers have fewer workers than there are ranks, each rank decides only on layers of which it is a worker.
        """
        return [self.verdict(candidate.change) for candidate in candidates]

    def remember(self, value: float, last: float | None, *, renewed: bool) -> float | None:
        """Return the number to store for a layer until its next decision, also in checkpoints.

        By default the "trace" or "norm" at the last decomposition.

        Args:
            value: The measured number; for several factors the largest.
            last: The previous result. None: there is none.
            renewed: Whether the layer is decomposed.
        """
        if self.measure in OF_FACTORS:
            return None
        return value if renewed and isfinite(value) else last

    # --- Checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers for checkpoints, besides the results of `remember`; by default none.

        For rules with further state, such as a validation loss, which must be equal on all ranks.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; not called if a checkpoint has no such state."""
        return


class NormRule(RefreshRule):
    """Refresh all layers, first those whose norm has changed most since their last decomposition.

    `natgrad.Capped` uses it if there is no other criterion. By the triangle inequality the relative change of the
    product of norms is a lower bound of the relative change of a Kronecker product.
    """

    measure = "norm"


NORM = NormRule()


def relative(value: float, last: float | None) -> float:
    """Return ``|value - last| / |last|``; infinite if `last` is None or 0, or a number is not finite."""
    if last is None or last == 0 or not (isfinite(value) and isfinite(last)):
        return inf
    return abs(value - last) / abs(last)


def mean_interval(intervals: Sequence[float]) -> float:
    """Return the harmonic mean of intervals: the interval with the same mean rate."""
    if len(set(intervals)) == 1:
        return float(intervals[0])
    return len(intervals) / sum(1 / interval for interval in intervals)


def side_of(names: Collection[str], inputs: Collection[str]) -> Reads:
    """Return the sources of the statistics `names`, where those in `inputs` need no gradient."""
    if names and all(name in inputs for name in names):
        return "inputs"
    return "both" if any(name in inputs for name in names) else "gradients"


def check_by(name: str, by: object, criterion: RefreshRule) -> None:
    """Check that a criterion can decide by "layer" or by "factor".

    Raises:
        ValueError: if `by` is neither, or is "factor" and the criterion measures whole layers.
    """
    require_one_of(name, by, *get_args(By))
    fits = by == "layer" or criterion.measure in (*OF_FACTORS, "nothing")
    require(fits, name, by, f"'layer' with {criterion!r}, which measures whole layers")


def _due(interval: float, step: int, last: int | None) -> bool:
    return last is None or step - last >= interval
