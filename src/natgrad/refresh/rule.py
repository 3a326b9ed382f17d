"""The interface of refresh rules."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeAlias

from typing_extensions import override

from natgrad.errors import ArgumentError, with_suggestions
from natgrad.schedule import check_number, is_number

# The source of a statistic. "gradients": every source that needs a backward pass.
Side: TypeAlias = Literal["inputs", "gradients"]
# The sources of the statistics that a decomposition reads.
Reads: TypeAlias = Literal["inputs", "gradients", "both"]

SIDES: tuple[Side, ...] = ("inputs", "gradients")
READS: tuple[Reads, ...] = (*SIDES, "both")

Measure: TypeAlias = Literal["trace", "drift"]

INTERVAL = "a number of steps >= 1"
"""The allowed values of intervals, for error messages."""


@dataclass(frozen=True)
class Candidate:
    """A layer whose decompositions are due.

    Attributes:
        layer: The name of its module.
        change: By how much it has changed (`RefreshRule.measure`); infinite if unknown.
    """

    layer: str
    change: float = inf


class RefreshRule:
    """Decides when statistics are captured and when layers are decomposed.

    Every method has a default; a rule that overrides none behaves like ``natgrad.Refresh()``. A rule that chooses among
    the layers sets `measure` and overrides `due`; `natgrad.Adaptive` gives it other intervals.

    The methods must change nothing and depend only on their arguments and the rule's options, because all ranks call
    them, any number of times, and must get the same answers. The first capture and decomposition are due at once, and a
    failed decomposition at the next decision, whatever the rule returns.

    Examples:
        >>> class LargestDrift(natgrad.RefreshRule):
        ...     measure = "drift"
        ...
        ...     def due(self, step, candidates):
        ...         most = max(candidate.change for candidate in candidates)
        ...         return {candidate.layer for candidate in candidates if candidate.change == most}
        >>> preconditioner = natgrad.Preconditioner(model, refresh=LargestDrift())

    Attributes:
        measure: What is measured of each layer when decompositions are due. None: nothing, and all layers are
            decomposed. "trace": the relative change of the trace of the damped Fisher block since the last decision.
            "drift": the largest ``‖X - X_last‖ / ‖X_last‖`` of its statistics X, where X_last was decomposed last.
            Measuring waits for the device.
        separate: Whether statistics of inputs and of gradients have different intervals.
        spread: Over how many steps the decompositions of a refresh are spread, some layers in each; at most the
            interval.
    """

    measure: Measure | None = None
    separate: bool = False
    spread: int = 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def due(self, step: int, candidates: Sequence[Candidate]) -> Collection[str]:
        """Return the names of the layers to decompose, out of the `candidates`; by default all.

        Called with a `measure` only. If layers have fewer workers than there are ranks, each rank decides only on
        layers of which it is a worker.

        Args:
            step: Completed steps.
            candidates: The layers whose decompositions are due.
        """
        return {candidate.layer for candidate in candidates}

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

    def check(self, step: int) -> None:
        """Check the intervals of the step after `step` completed ones, before it changes anything.

        Raises:
            ValueError: if the rule, or a schedule of it, returns something that is not an interval.
        """
        for side in SIDES:
            _check_interval(self, "factor_interval", step + 1, side)
        for reads in READS:
            _check_interval(self, "inverse_interval", step, reads)

    def settings(self, step: int) -> object:
        """Return the settings that must be equal on all ranks, as an object whose ``repr`` can be compared."""
        options: dict[str, object] = {}
        for name, value in vars(self).items():
            if isinstance(value, RefreshRule):
                options[name] = value.settings(step)
            elif value is None or isinstance(value, (bool, int, float, str, tuple)):
                options[name] = value
        intervals = [self.factor_interval(step, side) for side in SIDES]
        intervals += [self.inverse_interval(step, side) for side in SIDES]
        return type(self).__name__, options, intervals


def _check_interval(rule: RefreshRule, method: str, step: int, reads: Reads) -> None:
    value = getattr(rule, method)(step, reads)
    if not (is_number(value) and value >= 1):
        raise ArgumentError(f"{type(rule).__name__}.{method}({step}, {reads!r})", value, INTERVAL)


def side_of(names: Collection[str], inputs: Collection[str]) -> Reads:
    """Return the sources of the statistics `names`, where those in `inputs` need no gradient."""
    if names and all(name in inputs for name in names):
        return "inputs"
    return "both" if any(name in inputs for name in names) else "gradients"


@with_suggestions
@dataclass(frozen=True, kw_only=True)
class TraceRule(RefreshRule):
    """Decompose a layer if the trace of its damped Fisher block has changed by more than `upper` since its last check.

    ``Δ = |tr(F_k + λI) - tr(F_{k-1} + λI)| / tr(F_{k-1} + λI)``, where k counts the checks of the layer.

    For K-FAC ``tr(F + λI) = tr A · tr G + λ d_A d_G``. F is computed from running averages; in the source, which
    ``factor_decay=0`` reproduces, from one batch.

    Source: Chen 2021 (THOR).

    Attributes:
        upper: ω₁.

    Raises:
        ValueError: unless `upper` is a number > 0.
    """

    upper: float = 0.01

    measure = "trace"

    def __post_init__(self) -> None:
        check_number("upper", self.upper, "a number > 0", minimum=0, strict=True)

    @override
    def due(self, step: int, candidates: Sequence[Candidate]) -> Collection[str]:
        return {candidate.layer for candidate in candidates if candidate.change > self.upper}


@with_suggestions
@dataclass(frozen=True)
class DriftRule(RefreshRule):
    """Decompose a layer if ``‖X_t - X_last‖ / ‖X_last‖ >= threshold`` for one of its factors X.

    X_last is the running average at the last decomposition; norms are Frobenius norms. The workers of a layer store a
    second copy of its factors.

    Source: Osawa 2019, eq. 21.

    Attributes:
        threshold: The smallest relative change that causes a decomposition.

    Raises:
        ValueError: unless `threshold` is a number > 0.
    """

    threshold: float = 0.1

    measure = "drift"

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, "a number > 0", minimum=0, strict=True)

    @override
    def due(self, step: int, candidates: Sequence[Candidate]) -> Collection[str]:
        return {candidate.layer for candidate in candidates if candidate.change >= self.threshold}
