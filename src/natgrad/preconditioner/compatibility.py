"""Which choices of curvature, placement and refresh rule exclude each other.

Such a combination raises ``ValueError`` on several ranks. In one process it raises too, unless one process can do it:
then `warn_of_combinations` warns, so that the problem shows before the first run on several ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from natgrad.curvature import Curvature
from natgrad.curvature.base import computed_for, gathered, statistics_of
from natgrad.distributed import Placement
from natgrad.errors import NatgradWarning, require
from natgrad.layers import Layer
from natgrad.refresh import RefreshRule


@dataclass(frozen=True)
class Conflict:
    """Choices that exclude each other.

    Attributes:
        argument: The argument of `natgrad.Preconditioner` that the error names.
        value: Its value.
        allowed: The allowed values.
        reason: Why the choices are incompatible.
        works_in_one_process: Whether one process can do it.
    """

    argument: str
    value: Any
    allowed: str
    reason: str
    works_in_one_process: bool = False


def conflicts(
    layer: Layer,
    curvature: Curvature,
    placement: Placement,
    refresh: RefreshRule | None,
) -> Iterator[Conflict]:
    """Yield the conflicts among the choices for one layer. "auto" is compatible with everything."""
    statistics, rule, name = statistics_of(curvature, layer), placement.rule, repr(curvature)
    computed = computed_for(statistics)
    separate = refresh is not None and refresh.separate

    where = str(placement)
    # A layer's only worker captures alone, but lookups are summed over all ranks.
    for_others = layer.form == "one-hot" if rule.uses_own_samples else not rule.all_ranks_work
    if computed and for_others:
        allowed = "'comm-opt', 'pipelined', 'background', 'hybrid:1' or 'dp'"
        reason = f"{name} uses {', '.join(computed)} in captures, so every rank that captures must hold it"
        yield Conflict("placement", where, allowed, reason, works_in_one_process=True)
    if rule.renews_in_background:
        allowed = "another than 'background'"
        if gathered(statistics):
            yield Conflict("placement", where, allowed, f"{name} uses the rows of the same step")
        if separate:
            reason = f"all parts of a layer are decomposed together there, and {refresh!r} decomposes the two sides at "
            yield Conflict("placement", where, allowed, reason + "different steps")
    if rule.sends_during_backward:
        allowed = "another than 'pipelined'"
        if separate:
            reason = (
                f"all sums of a layer are sent together there, and {refresh!r} captures the two sides at different "
            )
            yield Conflict("placement", where, allowed, reason + "steps")


def check_combinations(
    covered: Iterable[tuple[Layer, Curvature]],
    placement: Placement,
    refresh: RefreshRule | None,
    ranks: int,
) -> None:
    """Check that the choices for all layers are compatible.

    A refresh rule of None is not checked.

    Raises:
        ValueError: if there is a conflict, unless `ranks` is 1 and one process can do it.
    """
    for layer, curvature in covered:
        for conflict in conflicts(layer, curvature, placement, refresh):
            fits = ranks == 1 and conflict.works_in_one_process
            require(fits, conflict.argument, conflict.value, f"{conflict.allowed}: {conflict.reason}")


def warn_of_combinations(covered: Iterable[tuple[Layer, Curvature]], placement: Placement) -> None:
    """Warn in one process, after `check_combinations`, of a combination that several ranks would refuse."""
    for layer, curvature in covered:
        for conflict in conflicts(layer, curvature, placement, None):
            warnings.warn(
                f"natgrad: {conflict.argument}={conflict.value!r} works in one process only and is refused on several "
                f"ranks, where it must be {conflict.allowed}: {conflict.reason}",
                NatgradWarning,
                stacklevel=3,
            )
            return
