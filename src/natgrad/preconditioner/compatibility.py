"""Which choices do not go together: one table, for every number of ranks.

A combination of this table raises ``ValueError`` on several ranks. In one process it raises too where nothing could
work even there; where one process is able to do it, `warn_of_combinations` warns, so that the error does not wait for
the first run on several ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from natgrad.curvature import Curvature
from natgrad.curvature.base import computed_for, gathered, replayed_statistics, statistics_of
from natgrad.damping.adaptive import Adaptive
from natgrad.damping.control import Control
from natgrad.distributed import Placement
from natgrad.errors import NatgradWarning, require
from natgrad.layers import Layer
from natgrad.refresh import RefreshRule
from natgrad.specs import Statistic


@dataclass(frozen=True)
class Choices:
    """What one layer is preconditioned with.

    Attributes:
        layer: The layer.
        curvature: Its curvature.
        placement: Where curvature is computed; "auto" goes with everything.
        refresh: When statistics are captured and decomposed; None: not decided.
        damping: The rule of γ; None: a number, or not decided.
    """

    layer: Layer
    curvature: Curvature
    placement: Placement
    refresh: RefreshRule | None = None
    damping: Adaptive | None = None

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The statistics of the layer."""
        return statistics_of(self.curvature, self.layer)


@dataclass(frozen=True)
class Incompatibility:
    """One row of the table.

    Attributes:
        argument: The argument of `natgrad.Preconditioner` that the error names.
        holds: Whether choices are of this kind.
        instead: What the argument must be instead; ``{curvature}``, ``{refresh}`` and ``{damping}`` stand for choices.
        reason: Why the choices do not go together.
        works_in_one_process: Whether only several ranks cannot do it.
    """

    argument: str
    holds: Callable[[Choices], bool]
    instead: str
    reason: str
    works_in_one_process: bool = False

    def describe(self, choices: Choices) -> tuple[str, str]:
        """Return the value of the argument, and in words what it must be instead and why."""
        words = {
            "curvature": repr(choices.curvature),
            "refresh": repr(choices.refresh),
            "damping": type(choices.damping).__name__,
            "looks": ", ".join(computed_for(choices.statistics)),
        }
        value = {"placement": str(choices.placement), "curvature": words["curvature"], "refresh": words["refresh"]}
        return value[self.argument], f"{self.instead}: {self.reason}".format(**words)


def _captures_for_others(choices: Choices) -> bool:
    """Return whether ranks capture statistics of a layer of which they do not hold the decompositions."""
    rule = choices.placement.rule
    if rule.uses_own_samples:  # a layer's only worker captures alone, but lookups are summed over all ranks
        return choices.layer.form == "one-hot"
    return not rule.all_ranks_work


TABLE: tuple[Incompatibility, ...] = (
    Incompatibility(
        "placement",
        lambda own: bool(computed_for(own.statistics)) and _captures_for_others(own),
        "'comm-opt', 'pipelined', 'background', 'hybrid:1' or 'dp'",
        "{curvature} looks at {looks}, which every rank that captures must hold",
        works_in_one_process=True,
    ),
    Incompatibility(
        "placement",
        lambda own: bool(gathered(own.statistics)) and own.placement.rule.renews_in_background,
        "another than 'background'",
        "{curvature} renews by the rows of the very step",
    ),
    Incompatibility(
        "placement",
        lambda own: bool(replayed_statistics(own.statistics)) and own.placement.rule.renews_in_background,
        "another than 'background'",
        "{curvature} compares sums over a step, after which they would arrive",
    ),
    Incompatibility(
        "placement",
        lambda own: own.refresh is not None and own.refresh.separate and own.placement.rule.sends_during_backward,
        "another than 'pipelined'",
        "all sums of a layer leave together there, and {refresh} captures the two sides at different steps",
    ),
    Incompatibility(
        "placement",
        lambda own: own.refresh is not None and own.refresh.separate and own.placement.rule.renews_in_background,
        "another than 'background'",
        "all parts of a layer are renewed together there, and {refresh} renews the two sides at different steps",
    ),
    Incompatibility(
        "placement",
        lambda own: _rule_stops(own.refresh) and own.placement.rule.sends_during_backward,
        "another than 'pipelined'",
        "all layers leave alike there, and {refresh} stops some of them",
    ),
    Incompatibility(
        "refresh",
        lambda own: bool(replayed_statistics(own.statistics)) and own.refresh is not None and own.refresh.separate,
        "one for both sides",
        "the second pass of {curvature} sees both again",
    ),
    Incompatibility(
        "refresh",
        lambda own: (
            bool(replayed_statistics(own.statistics)) and own.refresh is not None and own.refresh.criterion is not None
        ),
        "a natgrad.Refresh",
        "{curvature} updates all layers at every second pass, and no rule can leave some out",
    ),
    Incompatibility(
        "curvature",
        lambda own: own.damping is not None and own.damping.sizes and own.curvature.trace_reads is None,
        "one whose statistics tell its trace, as KFAC",
        "damping={damping} goes by the size of the Fisher",
    ),
    Incompatibility(
        "curvature",
        lambda own: own.damping is not None and own.damping.compares and own.curvature.fisher_product_reads is None,
        "one that can multiply by its Fisher, as KFAC",
        "damping={damping} compares each step with its quadratic model",
    ),
)


def _rule_stops(refresh: RefreshRule | None) -> bool:
    return refresh is not None and refresh.criterion is not None and refresh.criterion.stops


def check_combinations(
    covered: Iterable[tuple[Layer, Curvature]],
    placement: Placement,
    refresh: RefreshRule | None,
    damping: Control | None,
    ranks: int,
) -> None:
    """Check that the choices for all layers go together.

    Args:
        covered: The layers with their curvatures.
        placement: Where curvature is computed.
        refresh: When it is; None: not to be checked.
        damping: γ; None: not to be checked.
        ranks: How many ranks there are.

    Raises:
        ValueError: if the table has a row for them, unless one process can do it and `ranks` is 1.
    """
    for choices, entry in _found(covered, placement, refresh, damping):
        value, allowed = entry.describe(choices)
        require(ranks == 1 and entry.works_in_one_process, entry.argument, value, allowed)


def warn_of_combinations(
    covered: Iterable[tuple[Layer, Curvature]],
    placement: Placement,
    refresh: RefreshRule | None,
    damping: Control | None,
    ranks: int,
) -> None:
    """Warn where one process does what several ranks would refuse; called by the constructor itself.

    Args:
        covered: As of `check_combinations`.
        placement: Likewise.
        refresh: Likewise.
        damping: Likewise.
        ranks: Likewise.
    """
    for choices, entry in _found(covered, placement, refresh, damping):
        if ranks == 1 and entry.works_in_one_process:
            value, allowed = entry.describe(choices)
            warnings.warn(
                f"natgrad: {entry.argument}={value!r} works in one process only and is refused on several ranks, where "
                f"it must be {allowed}",
                NatgradWarning,
                stacklevel=3,
            )
            return


def _found(
    covered: Iterable[tuple[Layer, Curvature]],
    placement: Placement,
    refresh: RefreshRule | None,
    damping: Control | None,
) -> Iterator[tuple[Choices, Incompatibility]]:
    """Yield the rows of the table that the choices meet, in its order, with the first layer of each."""
    rule = None if damping is None else damping.rule
    every = [Choices(layer, curvature, placement, refresh, rule) for layer, curvature in covered]
    for entry in TABLE:
        first = next((choices for choices in every if entry.holds(choices)), None)
        if first is not None:
            yield first, entry
