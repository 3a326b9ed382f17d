"""The table of incompatible choices.

A combination in this table raises ``ValueError`` on several ranks. In one process it raises too, unless one process can
do it: then `warn_of_combinations` warns, so that the problem shows before the first run on several ranks.
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
    """The choices for one layer.

    Attributes:
        layer: The layer.
        curvature: Its curvature.
        placement: The placement. "auto" is compatible with everything.
        refresh: The refresh rule. None: not checked.
        damping: The damping rule. None: a number, or not checked.
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
        holds: Returns whether the row applies to some choices.
        instead: The allowed values of the argument; may contain ``{curvature}``, ``{refresh}`` and ``{damping}``.
        reason: Why the choices are incompatible.
        works_in_one_process: Whether one process can do it.
    """

    argument: str
    holds: Callable[[Choices], bool]
    instead: str
    reason: str
    works_in_one_process: bool = False

    def describe(self, choices: Choices) -> tuple[str, str]:
        """Return the value of the argument, and the allowed values with the reason."""
        words = {
            "curvature": repr(choices.curvature),
            "refresh": repr(choices.refresh),
            "damping": type(choices.damping).__name__,
            "looks": ", ".join(computed_for(choices.statistics)),
        }
        value = {"placement": str(choices.placement), "curvature": words["curvature"], "refresh": words["refresh"]}
        return value[self.argument], f"{self.instead}: {self.reason}".format(**words)


def _captures_for_others(choices: Choices) -> bool:
    """Return whether ranks capture statistics of layers whose decompositions they do not hold."""
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
        lambda own: own.damping is not None and own.damping.sizes and own.curvature.is_normalized,
        "one whose damping has the unit of the Fisher, as KFAC",
        "damping={damping} goes by the size of the Fisher, and the damping of {curvature} is relative to it",
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
    """Check that the choices for all layers are compatible.

    Args:
        covered: The layers with their curvatures.
        placement: The placement.
        refresh: The refresh rule. None: not checked.
        damping: γ. None: not checked.
        ranks: The number of ranks.

    Raises:
        ValueError: if a row of the table applies, unless `ranks` is 1 and one process can do it.
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
    """Warn of combinations that work in one process only.

    Args:
        covered: As in `check_combinations`.
        placement: As in `check_combinations`.
        refresh: As in `check_combinations`.
        damping: As in `check_combinations`.
        ranks: As in `check_combinations`.
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
    """Yield the rows of the table that apply, in order, each with the first layer concerned."""
    rule = None if damping is None else damping.rule
    every = [Choices(layer, curvature, placement, refresh, rule) for layer, curvature in covered]
    for entry in TABLE:
        first = next((choices for choices in every if entry.holds(choices)), None)
        if first is not None:
            yield first, entry
