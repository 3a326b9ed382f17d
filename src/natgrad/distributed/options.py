"""The options of a placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from natgrad.distributed.rules import PlacementRule, names, rule_of
from natgrad.errors import ArgumentError, did_you_mean, require, require_one_of, with_suggestions
from natgrad.schedule import check_whole, is_number, is_whole


@with_suggestions
@dataclass(frozen=True, kw_only=True)
class Placement:
    """The distribution of work and state over ranks.

    The *workers* of a layer hold its decompositions and precondition its gradient. The other ranks receive the
    preconditioned gradient at every step.

    - "comm-opt" (Pauloski 2022, sections 4.2 and 4.3): all ranks are workers. Factors are summed over all ranks, one
      rank decomposes each, and the results are sent to all.
    - "mem-opt": each layer has one worker. "hybrid" (KAISA, Pauloski 2021): a `fraction` of the ranks.
    - "reduce-scatter" (Osawa 2019): as "mem-opt", but factors are sent to their worker only.
    - "dp" (DP-KFAC, Zhang 2022): as "mem-opt", but the worker builds a layer's factors from its own samples.
    - "pipelined" (after SPD-KFAC, Shi 2021): as "comm-opt", but factors are sent during the backward pass, under
      ``DistributedDataParallel``.
    - "background": as "comm-opt", but decompositions run during the following steps, which use the previous results.
    - "auto" (KAISA's rule): "comm-opt" if its curvature fits in `memory`, else the largest "hybrid" that does, else
      "mem-opt". Without `memory`, the curvature of a rank may take a quarter of the memory of its device, or on the
      host a quarter of the machine's memory divided by the number of ranks. Curvatures that need "comm-opt" (EKFAC),
      or whose size depends on the batch (SNGD, HyLo), use "comm-opt". Where natgrad averages the gradients
      (``gradients="reduce"``), or FSDP2 shards them (not HSDP), no message is longer for having one worker: others use
      "reduce-scatter" there, but with "reduce" "mem-opt", `deferred`, if its curvature fits and factors are due more
      than twice as often as decompositions at first. The choice is made once, at construction.

    Attributes:
        name: One of the names above, one registered with `natgrad.register_placement`, or a `natgrad.PlacementRule`.
        fraction: The fraction of ranks that are workers of a layer ("hybrid" only), in (0, 1]. The number of workers is
            the nearest divisor of the number of ranks.
        owners: "balanced": tasks go to the least loaded rank, the largest first. "round-robin": in turn.
        speeds: The relative speed of each rank, equal on all ranks. None: all ranks are equally fast.
        costs: Measured work by layer key between two decompositions, in any unit, equal on all ranks. That of other
            layers is modelled.
        positions: The number of positions (samples × positions of a sample) of each layer in a rank's batch, by layer
            key, equal on all ranks. With it, "dp" balances the work of building factors besides decompositions.
        bucket: The largest size in bytes of a message sent during the backward pass: of factors ("pipelined") or
            gradients (``gradients="reduce"``). It has at most an eighth of them, and at least one layer's.
        staleness: The number of steps after which all ranks use the results of decompositions in the background
            ("background"). They use them sooner if inverses are due again.
        deferred: Whether factors are summed over the ranks only when decompositions are due: with
            ``Refresh(factors=1, inverses=10)`` in a tenth of the steps. Until then each rank keeps its part of the
            running averages, whose sum they are, and sends three numbers for each block when factors are due. Steps are
            the same (but a narrow ``Precision.wire`` rounds whole averages). For "comm-opt", "mem-opt" and "hybrid";
            not the factors of EKFAC, which each step reads. A state is complete only after ``consolidate_state_dict()``
            or with ``gather=True``; others hold the statistics of one rank since the last decompositions. None: only if
            "auto" chooses so.
        memory: The most bytes of curvature that a rank may hold between two steps, equal on all ranks. "auto" chooses
            by it; it is an error if the placement holds more. Rows of samples (SNGD, HyLo) are counted when the batch
            has determined their number: before they are gathered, a step that would exceed the limit raises a
            ``ValueError`` on all ranks. None: no limit, and for "auto" the share above.

    Raises:
        ValueError: if an option is not allowed.
    """

    name: str | PlacementRule = "auto"
    fraction: float | None = None
    owners: Literal["balanced", "round-robin"] = "balanced"
    speeds: tuple[float, ...] | None = None
    costs: Mapping[str, float] | None = None
    positions: Mapping[str, float] | None = None
    bucket: int = 25 * 2**20
    staleness: int = 1
    deferred: bool | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        rule_of(self.name, self.fraction)
        require_one_of("owners", self.owners, "balanced", "round-robin")
        for name in ("bucket", "staleness"):
            check_whole(name, getattr(self, name), 1)
        require(self.deferred in (None, False, True), "deferred", self.deferred, "True, False or None")
        fits = self.memory is None or (is_whole(self.memory) and self.memory >= 1)
        require(fits, "memory", self.memory, "a number of bytes >= 1, or None")
        if self.speeds is not None:
            fits = isinstance(self.speeds, tuple) and all(is_number(speed) and speed > 0 for speed in self.speeds)
            require(fits, "speeds", self.speeds, "a tuple of a number > 0 for each rank, or None")
        for name in ("costs", "positions"):
            value = getattr(self, name)
            fits = isinstance(value, Mapping) and all(is_number(number) and number >= 0 for number in value.values())
            require(value is None or fits, name, value, "a number >= 0 for each layer, or None")

    def workers(self, ranks: int) -> int:
        """Return the number of workers of a layer for P = `ranks`.

        Raises:
            ValueError: if the rule does not return a divisor of P.
        """
        count = self.rule.workers(ranks)
        fits = is_whole(count) and count >= 1 and ranks % count == 0
        require(fits, f"{self.rule.name}.workers({ranks})", count, "a divisor of the number of ranks")
        return count

    @property
    def rule(self) -> PlacementRule:
        """The placement rule. For "auto", before a plan has chosen, that of "comm-opt"."""
        return rule_of(self.name, self.fraction)

    def __str__(self) -> str:
        """Return the name, with the fraction of a hybrid, and whether sums are deferred."""
        name = self.name if isinstance(self.name, str) else self.name.name
        name = name if self.fraction is None else f"{name}:{self.fraction:g}"
        return f"{name}, deferred" if self.deferred else name


def resolve(placement: object) -> Placement:
    """Return the options for a name such as "mem-opt" or "hybrid:0.5", or for a rule; options are returned unchanged.

    Raises:
        ValueError: if `placement` is none of these.
    """
    if isinstance(placement, Placement):
        return placement
    if isinstance(placement, PlacementRule):
        return Placement(name=placement)
    known = names()
    allowed = f"{', '.join(map(repr, known))} ('hybrid:0.5' with its fraction), a natgrad.Placement or a PlacementRule"
    require(isinstance(placement, str), "placement", placement, allowed)
    name, colon, fraction = str(placement).partition(":")
    fits = name in known and (not colon or name == "hybrid")
    require(fits, "placement", placement, allowed, did_you_mean(name, known))
    if name != "hybrid":
        return Placement(name=name)
    try:
        return Placement(name="hybrid", fraction=float(fraction))
    except ValueError:
        raise ArgumentError("placement", placement, "'hybrid:' and a number in (0, 1], such as 'hybrid:0.5'") from None
