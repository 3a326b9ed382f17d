"""Refresh rules: fixed and scheduled intervals, layers chosen by a rule; and their names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import get_args

from typing_extensions import override

from natgrad.errors import did_you_mean, require, require_one_of, with_suggestions
from natgrad.refresh.rule import INTERVAL, SIDES, Candidate, DriftRule, Measure, Reads, RefreshRule, Side, TraceRule
from natgrad.schedule import Schedule, check_number, check_schedule, check_whole, is_whole, value_at


@with_suggestions
@dataclass(frozen=True, kw_only=True)
class Sides:
    """Separate intervals for A and G, because "the factor A fluctuates less than G" (Osawa 2019, section 5.4).

    Attributes:
        inputs: The interval of statistics of a layer's inputs only (`Statistic.source`: A of K-FAC) and of their
            decompositions: a number of steps, or a callable of the step.
        gradients: The interval of all others.

    Raises:
        ValueError: if an interval is below 1.
    """

    inputs: Schedule
    gradients: Schedule

    def __post_init__(self) -> None:
        for side in SIDES:
            check_schedule(side, getattr(self, side), INTERVAL, minimum=1)


@with_suggestions
@dataclass(frozen=True, kw_only=True)
class Refresh(RefreshRule):
    """Refresh at intervals counted in completed steps (stale curvature: Pauloski 2022, section 4.3).

    An update is due when ``step - last >= interval``, and at once if there has been none.

    Attributes:
        factors: Steps between two captures of statistics (A, G): a number, a callable of the step, or `natgrad.Sides`.
        inverses: Steps between two decompositions: a number, a callable of the step, or `natgrad.Sides`. A
            decomposition that reads both A and G follows the shorter interval.
        spread: Over how many steps the decompositions of a refresh are spread, some layers in each, so that no step
            takes much longer than others; at most the interval. A placement in the background does all at once.

    Raises:
        ValueError: if an interval is below 1, `spread` is not a whole number of at least 1, or it is above 1 with
            `natgrad.Sides`.
    """

    factors: Schedule | Sides = 1
    inverses: Schedule | Sides = 10
    spread: int = 1

    def __post_init__(self) -> None:
        for name in ("factors", "inverses"):
            value = getattr(self, name)
            if not isinstance(value, Sides):
                check_schedule(name, value, f"{INTERVAL}, or natgrad.Sides", minimum=1)
        check_whole("spread", self.spread, 1)
        require(self.spread == 1 or not self.separate, "spread", self.spread, "1 with natgrad.Sides")

    @property
    @override
    def separate(self) -> bool:  # type: ignore[override]
        return isinstance(self.factors, Sides) or isinstance(self.inverses, Sides)

    @override
    def factor_interval(self, step: int, side: Side = "gradients") -> float:
        return _interval("factors", self.factors, side, step)

    @override
    def inverse_interval(self, step: int, reads: Reads = "both") -> float:
        return _interval("inverses", self.inverses, reads, step)


@with_suggestions
@dataclass(frozen=True)
class Adaptive(RefreshRule):
    """Decompose only the layers that a rule chooses when inverses are due. The first refresh includes all.

    Attributes:
        rule: `natgrad.TraceRule`, `natgrad.DriftRule` or your own `natgrad.RefreshRule` with a `measure`. Required.
        factors: Steps between two captures of statistics: a number, or a callable of the step.
        inverses: Steps between two decisions: a number, or a callable of the step.

    Raises:
        ValueError: if `rule` is not such a rule, or if an interval is below 1.
    """

    rule: RefreshRule | None = None
    factors: Schedule = field(default=1, kw_only=True)
    inverses: Schedule = field(default=10, kw_only=True)

    def __post_init__(self) -> None:
        chooses = isinstance(self.rule, RefreshRule) and self.rule.measure is not None
        require(chooses, "rule", self.rule, "a rule such as natgrad.TraceRule()")
        for name in ("factors", "inverses"):
            check_schedule(name, getattr(self, name), INTERVAL, minimum=1)

    @property
    def _rule(self) -> RefreshRule:
        assert self.rule is not None  # the constructor requires it
        return self.rule

    @property
    @override
    def measure(self) -> Measure | None:  # type: ignore[override]
        return self._rule.measure

    @override
    def due(self, step: int, candidates: Sequence[Candidate]) -> Collection[str]:
        return self._rule.due(step, candidates)

    @override
    def factor_interval(self, step: int, side: Side = "gradients") -> float:
        return value_at("factors", self.factors, step, INTERVAL, minimum=1)

    @override
    def inverse_interval(self, step: int, reads: Reads = "both") -> float:
        return value_at("inverses", self.inverses, step, INTERVAL, minimum=1)


# --- Schedules: callables of the step that return an interval -------------------------------------------------------


@with_suggestions
@dataclass(frozen=True)
class GrowingInterval:
    """``min(20, 5 ⌊e/5⌋ + 1)`` in epoch e: every step before epoch 5, then every 6th, 11th, 16th, finally every 20th.

    In 45 epochs, 17 % of the steps are refreshes. Example: ``Refresh(inverses=GrowingInterval(78))``.

    Source: Osawa 2019, eq. 22, section 5.4.

    Attributes:
        steps_per_epoch: The steps of an epoch, which define epochs independently of ``next_epoch()``.
        epochs: The number of epochs after which the interval grows, and of steps by which it grows.
        most: The longest interval.

    Raises:
        ValueError: unless all are whole numbers of at least 1.
    """

    steps_per_epoch: int
    epochs: int = 5
    most: int = 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(type(value) is int and value >= 1, name, value, "a whole number >= 1")

    def __call__(self, step: int) -> int:
        """Return the interval after `step` completed steps."""
        epoch = step // self.steps_per_epoch
        return min(self.most, self.epochs * (epoch // self.epochs) + 1)


@with_suggestions
@dataclass(frozen=True)
class DoublingInterval:
    """Due at steps 0, 1, 2, 4, 8... until the interval is `most`, because curvature changes fastest early in training.

    Attributes:
        most: The longest interval, in steps.

    Raises:
        ValueError: if it is below 1.
    """

    most: float

    def __post_init__(self) -> None:
        check_number("most", self.most, INTERVAL, minimum=1)

    def __call__(self, step: int) -> float:
        """Return the interval after `step` completed steps."""
        return max(1.0, min(float(self.most), step / 2))


@with_suggestions
@dataclass(frozen=True)
class TwoPhaseInterval:
    """1 before epoch 13, then 20. In 45 epochs, 32 % of the steps are refreshes.

    Source: Osawa 2019, eq. 23.

    Attributes:
        steps_per_epoch: The steps of an epoch.
        epochs: The number of epochs with a refresh in every step.
        interval: The interval afterwards.

    Raises:
        ValueError: unless all are whole numbers, `epochs` at least 0 and the others at least 1.
    """

    steps_per_epoch: int
    epochs: int = 13
    interval: int = 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "epochs" else 1
            require(type(value) is int and value >= least, name, value, f"a whole number >= {least}")

    def __call__(self, step: int) -> int:
        """Return the interval after `step` completed steps."""
        return 1 if step < self.epochs * self.steps_per_epoch else self.interval


@with_suggestions
@dataclass(frozen=True)
class MultiStepInterval:
    """Multiply the interval by `factor` at some steps, because running averages become more stable during training.

    Source: Pauloski 2022, section 5.3.

    Attributes:
        interval: The first interval.
        steps: The numbers of completed steps after which the interval is multiplied, increasing.
        factor: The factor.

    Raises:
        ValueError: if `interval` or `factor` is below 1, or `steps` are not increasing whole numbers.
    """

    interval: float
    steps: tuple[int, ...]
    factor: float = 2.0

    def __post_init__(self) -> None:
        check_number("interval", self.interval, INTERVAL, minimum=1)
        check_number("factor", self.factor, "a number >= 1", minimum=1)
        fits = isinstance(self.steps, (list, tuple)) and all(type(step) is int and step >= 0 for step in self.steps)
        fits = fits and all(step < after for step, after in zip(self.steps, self.steps[1:], strict=False))
        require(fits, "steps", self.steps, "increasing whole numbers")
        object.__setattr__(self, "steps", tuple(self.steps))

    def __call__(self, step: int) -> float:
        """Return the interval after `step` completed steps."""
        return self.interval * self.factor ** sum(step >= passed for passed in self.steps)


@with_suggestions
@dataclass(frozen=True)
class ScaledInterval:
    """``interval · reference / size``, at least 1: equally many refreshes in an epoch for any number of ranks.

    For example, 500 for 64 ranks becomes 2000 for 16 and 125 for 256.

    Source: Pauloski 2022, section 6.4.1.

    Attributes:
        interval: The interval for `reference`: a number, or a callable of the step.
        reference: A number of ranks, or of samples in the global batch.
        size: The same number in this training.

    Raises:
        ValueError: if `interval` is below 1, or `reference` or `size` is not a number above 0.
    """

    interval: Schedule
    reference: float
    size: float

    def __post_init__(self) -> None:
        check_schedule("interval", self.interval, INTERVAL, minimum=1)
        for name in ("reference", "size"):
            check_number(name, getattr(self, name), "a number > 0", minimum=0, strict=True)

    def __call__(self, step: int) -> float:
        """Return the interval after `step` completed steps."""
        interval = value_at("interval", self.interval, step, INTERVAL, minimum=1)
        return max(1.0, interval * self.reference / self.size)


def _interval(name: str, interval: Schedule | Sides, reads: Reads, step: int) -> float:
    """Return an interval after `step` completed steps; for "both" the shorter one."""
    if not isinstance(interval, Sides):
        return value_at(name, interval, step, INTERVAL, minimum=1)
    by_side = {side: value_at(f"{name}.{side}", getattr(interval, side), step, INTERVAL, minimum=1) for side in SIDES}
    return min(by_side.values()) if reads == "both" else by_side[reads]


# --- Names ----------------------------------------------------------------------------------------------------------

_RULES: dict[str, Callable[[], RefreshRule]] = {
    "fixed": Refresh,
    "trace": TraceRule,
    "drift": DriftRule,
}


def register_refresh(name: str, make: Callable[[], RefreshRule]) -> None:
    """Register a rule, so that ``Preconditioner(model, refresh=name)`` accepts its name.

    Register it in every process. Instances can be passed without registration.

    Args:
        name: The name.
        make: A function without arguments that returns the rule, such as a class whose options have defaults.

    Raises:
        ValueError: if `name` is not text, or is taken, or `make` cannot be called.
    """
    require(isinstance(name, str) and name, "name", name, "a text")
    require(callable(make), "make", make, "a subclass of natgrad.RefreshRule, or a function that returns an instance")
    require(_RULES.get(name, make) is make, "name", name, f"a name that is free, unlike {', '.join(_RULES)}")
    _RULES[name] = make


def resolve_refresh(refresh: object) -> RefreshRule:
    """Return the rule for the argument `refresh` of `natgrad.Preconditioner`.

    Raises:
        ValueError: if `refresh` is none of these, or attributes of the rule are not allowed.
    """
    allowed = "a natgrad.Refresh or natgrad.Adaptive, another natgrad.RefreshRule, one of the names "
    allowed += f"{', '.join(_RULES)}, or a whole number ≥ 1"
    if is_whole(refresh):
        require(refresh >= 1, "refresh", refresh, allowed)
        refresh = Refresh(inverses=refresh)
    if isinstance(refresh, str):
        require(refresh in _RULES, "refresh", refresh, allowed, did_you_mean(refresh, _RULES))
        refresh = _RULES[refresh]()
    require(isinstance(refresh, RefreshRule), "refresh", refresh, allowed)
    assert isinstance(refresh, RefreshRule)
    check_whole("spread", refresh.spread, 1)
    single = refresh.spread == 1 or (refresh.measure is None and not refresh.separate)
    require(single, "spread", refresh.spread, "1 for a rule with a measure or with separate intervals")
    if refresh.measure is not None:
        require_one_of(f"{type(refresh).__name__}.measure", refresh.measure, *get_args(Measure))
    return refresh
