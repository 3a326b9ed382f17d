"""Placement rules: how many ranks work for a layer, which ones, and where its statistics are summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from typing_extensions import override

from natgrad.errors import ArgumentError, did_you_mean, require
from natgrad.schedule import is_number

# Where the statistics of a layer are summed over the ranks: on "all" ranks, or on its only "worker". "alone": there is
# no sum, and the only worker uses the samples of its rank.
Destination: TypeAlias = Literal["all", "worker", "alone"]
# "later": on all ranks, when decompositions are due (`natgrad.Placement.deferred`).
Summed: TypeAlias = Literal["all", "worker", "alone", "later"]


@dataclass(frozen=True, kw_only=True)
class LayerDemand:
    """The work, messages and memory of a layer.

    Attributes:
        parts: The work of each task, in multiply-adds.
        sums: The number of elements of its statistics in messages (triangles of symmetric matrices).
        results: The number of elements of the result of each task in messages.
        rows: For a layer that sends rows of samples in place of sums (SNGD, HyLo): returns the bytes of this number of
            rows, and of their kernels, on a worker.
        gradients: The number of elements of its gradient.
        step_cost: The work of preconditioning its gradient once, in multiply-adds.
        is_sharded: Whether FSDP2 shards any of its parameters.
        blocks: The number of its blocks, whose decompositions may fail separately.
        averages: The bytes of its running averages.
        held: The bytes of the results of its tasks on a worker, without `rows`.
        can_wait: Whether its running averages are read only when decompositions are due, and never restarted.
        alone: Whether the samples of one rank are sufficient for its statistics. They are not for embedding tables, of
            which a rank looks up few rows.
    """

    parts: Mapping[str, float]
    sums: int = 0
    results: Mapping[str, int] = field(default_factory=dict)
    rows: Callable[[int], int] | None = None
    gradients: int = 0
    step_cost: float = 0.0
    is_sharded: bool = False
    blocks: int = 1
    averages: int = 0
    held: int = 0
    can_wait: bool = True
    alone: bool = True

    @property
    def cost(self) -> float:
        """The work of all tasks."""
        return sum(self.parts.values())


class PlacementRule:
    """The base class of placements.

    P ranks form a grid of ``workers(P)`` rows and ``P / workers(P)`` columns. Each layer belongs to a column, whose
    ranks are its workers. They share its decompositions, precondition its gradient, and send the result to the other
    ranks of their rows (KAISA, Pauloski 2021).

    Attributes:
        name: The name in messages and in `natgrad.Preconditioner.explain`.
        all_ranks_work: Whether every rank is a worker of every layer, for any number of ranks.
        uses_own_samples: Whether the statistics of a layer may be those of one rank's samples, so that results differ
            from those of one process.
        sends_during_backward: Whether statistics are sent during the backward pass; requires `all_ranks_work`.
        renews_in_background: Whether decompositions run during the following steps; requires `all_ranks_work`.
    """

    name: str = "own"
    all_ranks_work: bool = True
    uses_own_samples: bool = False
    sends_during_backward: bool = False
    renews_in_background: bool = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def workers(self, ranks: int) -> int:
        """Return the number of workers of a layer for P = `ranks`, a divisor of P."""
        return ranks

    def sums(self, layer: LayerDemand) -> Destination:
        """Return where the statistics of a layer are summed.

        Returns:
            "all"; if each layer has one worker, also "worker" or "alone".
        """
        return "all"

    def columns(self, layers: Mapping[str, LayerDemand], columns: int) -> Mapping[str, int]:
        """Return the columns of some layers. Others are assigned to the least loaded columns, the largest first.

        Args:
            layers: The demand of each layer, by its key, in the order of the model.
            columns: The number of columns.
        """
        return {}


class CommOpt(PlacementRule):
    """All ranks are workers; one of them runs each decomposition (Pauloski 2022, sections 4.2 and 4.3)."""

    name = "comm-opt"


class MemOpt(PlacementRule):
    """Each layer has one worker; all ranks keep its running averages (Pauloski 2022, sections 4.2 and 4.3)."""

    name = "mem-opt"
    all_ranks_work = False

    @override
    def workers(self, ranks: int) -> int:
        return 1


class ReduceScatter(MemOpt):
    """Each layer has one worker, which alone receives its statistics (Osawa 2019)."""

    name = "reduce-scatter"

    @override
    def sums(self, layer: LayerDemand) -> Destination:
        return "worker"


class DataParallel(MemOpt):
    """Each layer has one worker, which uses the statistics of its own samples (DP-KFAC, Zhang 2022)."""

    name = "dp"
    uses_own_samples = True

    @override
    def sums(self, layer: LayerDemand) -> Destination:
        return "alone" if layer.alone else "worker"


@dataclass(frozen=True)
class Hybrid(PlacementRule):
    """A fraction of the ranks are workers of a layer (KAISA, Pauloski 2021).

    Attributes:
        fraction: The fraction, in (0, 1]. The number of workers is the nearest divisor of the number of ranks.
    """

    fraction: float
    name = "hybrid"

    @property
    def all_ranks_work(self) -> bool:  # type: ignore[override]  # a class attribute of others
        """Whether every rank is a worker of every layer."""
        return self.fraction >= 1

    @override
    def workers(self, ranks: int) -> int:
        wanted = self.fraction * ranks
        divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
        return min(divisors, key=lambda n: (abs(n - wanted), n))


class Pipelined(CommOpt):
    """As "comm-opt", but statistics are sent during the backward pass (after SPD-KFAC, Shi 2021)."""

    name = "pipelined"
    sends_during_backward = True


class Background(CommOpt):
    """As "comm-opt", but decompositions run during the steps that follow (after PS-KFAC, Ba et al. 2017)."""

    name = "background"
    renews_in_background = True


_RULES: dict[str, Callable[[], PlacementRule]] = {
    "comm-opt": CommOpt,
    "mem-opt": MemOpt,
    "reduce-scatter": ReduceScatter,
    "dp": DataParallel,
    "pipelined": Pipelined,
    "background": Background,
}


def names() -> list[str]:
    """Return all names of placements: those of natgrad, then the registered ones."""
    return ["auto", "comm-opt", "mem-opt", "hybrid", *[name for name in _RULES if name not in ("comm-opt", "mem-opt")]]


def register_placement(name: str, make: Callable[[], PlacementRule]) -> None:
    """Register a placement, so that ``Preconditioner(model, placement=name)`` accepts its name.

    Register it in every process. Instances can be passed without registration.

    Args:
        name: The name, without a colon.
        make: A function without arguments that returns the rule, such as a class whose options have defaults.

    Raises:
        ValueError: if `name` is not text or is taken, or `make` cannot be called.
    """
    require(isinstance(name, str) and name and ":" not in name, "name", name, "a text without a colon")
    require(callable(make), "make", make, "a subclass of natgrad.PlacementRule, or a function that returns an instance")
    free = name not in ("auto", "hybrid") and _RULES.get(name, make) is make
    require(free, "name", name, f"a name that is free, unlike {', '.join(names())}")
    _RULES[name] = make


def rule_of(name: str | PlacementRule, fraction: float | None) -> PlacementRule:
    """Return the rule with a name, or `name` itself if it is a rule; for "auto" that of "comm-opt".

    Raises:
        ValueError: if there is no such rule, or the fraction does not fit it.
    """
    if name == "hybrid":
        fits = is_number(fraction) and 0 < (fraction or 0) <= 1
        require(fits, "fraction", fraction, "a number in (0, 1]")
        assert fraction is not None
        return Hybrid(fraction)
    if isinstance(name, PlacementRule):
        rule = name
    elif isinstance(name, str) and name in names():
        rule = _RULES.get(name, CommOpt)()
    else:
        allowed = f"one of {', '.join(map(repr, names()))}, or a natgrad.PlacementRule"
        raise ArgumentError("name", name, allowed, did_you_mean(name, names()))
    require(fraction is None, "fraction", fraction, "left out unless name='hybrid'")
    overlaps = rule.sends_during_backward or rule.renews_in_background
    fits = isinstance(rule, PlacementRule) and (rule.all_ranks_work or not overlaps)
    require(fits, "placement", rule.name, "one with all_ranks_work, where it overlaps with the passes or the steps")
    return rule
