"""The face of a curvature: which tensors it declares, and the mathematics on stacks of equal blocks.

A curvature knows one layer's block and nothing of process groups. It *declares* the tensors that are summed over
samples (`Spec`) and the pieces of work that turn them into what a solve needs (`Part`); placement routes both. All
tensors carry a leading dimension N: blocks of equal size are stored stacked, so that one call serves them all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

from natgrad.errors import require, require_one_of
from natgrad.layers import Layer, Rows
from natgrad.sampling.likelihood import Likelihood, resolve
from natgrad.schedule import is_number


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A tensor of one block.

    Attributes:
        name: Its key in the state.
        shape: Its shape, without the leading N.
        symmetric: Whether it is a symmetric matrix, of which captures write the lower triangle only.
        mean: What a statistic's raw sum is divided by: the number of samples, or of rows (samples x positions).
        degree: How often the gradients g enter a statistic as factors.
        counts: Whether a statistic counts rows; where only a share of them counts (masked tokens), it is corrected as
            what it is divided by.
        fresh: Whether of a statistic only what was seen last is kept, and no running average.
        recurrent: Whether it is made of what it was before, so that rounding adds up: kept in at least float32.
    """

    name: str
    shape: tuple[int, ...]
    symmetric: bool = False
    mean: Literal["samples", "rows"] = "samples"
    degree: int = 0
    counts: bool = False
    fresh: bool = False
    recurrent: bool = False

    @property
    def numel(self) -> int:
        """The number of elements of one block."""
        size = 1
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of work that one rank can do for one block, independently of all other parts.

    Attributes:
        name: Its name among the parts of the block.
        reads: The statistics that it needs, and what of the memory.
        diagonals: Those of the statistics of which the diagonals are enough: it gets ``[N, d]``, in any order.
        writes: What it makes, held until the next renewal.
        cost: Its work in multiply-adds, up to a factor common to all parts.
        warm: Whether it begins with what it has made last (`before` of `Curvature.renew`).
        restarts: The statistics of which a new running average begins with what it makes.
        everywhere: Whether every worker does it for itself: where the results are larger than the work.
        replayed: Whether it goes on with what a replay has shown; a renewal only begins it.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[Spec, ...]
    cost: float
    diagonals: tuple[str, ...] = ()
    warm: bool = False
    restarts: tuple[str, ...] = ()
    everywhere: bool = False
    replayed: bool = False


class Curvature(ABC):
    """An approximation of the Fisher block of a layer.

    Attributes:
        likelihood: The distribution that labels are drawn from, or None when the true labels serve (empirical Fisher).
        pools: Whether rows are summed over positions before they are seen ("reduce": Eschenhagen 2023).
        weighs: Whether it asks what of a sum of gradients may be rounding (`Rows.rounding`).
        rows: Whether it keeps rows and no sums over them (`natgrad.curvature.rows`).
        looks: Which of what the parts write `observe` needs: then only workers can capture.
        live: Which statistics `solve` needs, as they are at that step.
        early: Which statistics are of the inputs alone, without any gradient.
        replays: Which statistics are seen again in a replay: the same batch after the optimizer's step.
        multiplies: Which statistics `multiply` needs beside what renewals have made; None: it has no `multiply`.
        diagonals: Which statistics `diagonal` reads; none: there is no such estimate.
        definite: Whether ⟨V, W⟩ of what `solve` returns is never below 0 but for a fault.
        traced: Which statistics `trace` reads; none: there is none.
        rotated: Which statistics `misfit` reads; none: nothing that it writes are eigenvectors.
        default_damping: The damping of a preconditioner that is given none; of norm layers beside it too.
    """

    likelihood: Likelihood | None = None
    pools: bool = False
    weighs: bool = False
    rows: bool = False
    looks: tuple[str, ...] = ()
    live: tuple[str, ...] = ()
    early: tuple[str, ...] = ()
    replays: tuple[str, ...] = ()
    multiplies: tuple[str, ...] | None = None
    diagonals: tuple[str, ...] = ()
    definite: bool = True
    traced: tuple[str, ...] = ()
    rotated: tuple[str, ...] = ()
    default_damping: float = 1e-3

    def fit(self, layer: Layer) -> Curvature | str:
        """Return the variant of this curvature for `layer`, the same object for equal needs, or why there is none."""
        if any(other.form != layer.form for other in layer.others):
            return f"{self!r} has no form for an embedding tied with a linear layer"
        if layer.form == "elementwise":
            return self._elementwise
        return self if layer.form == "matrix" else f"{self!r} has no form for {type(layer.module).__name__}"

    @cached_property
    def _elementwise(self) -> Curvature:
        """What covers norm layers beside it: the same estimate, a block for each channel."""
        from natgrad.curvature.unitwise import UnitWise  # which builds on this file  # noqa: PLC0415

        fisher: Literal["empirical", "sampled"] = "empirical" if self.likelihood is None else "sampled"
        return UnitWise(fisher=fisher, factor_decay=self.factor_decay, likelihood=self.likelihood)

    @property
    @abstractmethod
    def factor_decay(self) -> float:
        """The weight of the old in running averages."""

    @abstractmethod
    def statistics(self, outputs: int, inputs: int) -> tuple[Spec, ...]:
        """Return what is summed over samples for a block ``[outputs, inputs]``."""

    @abstractmethod
    def parts(self, outputs: int, inputs: int) -> tuple[Part, ...]:
        """Return the work of a renewal for a block ``[outputs, inputs]``."""

    def memory(self, outputs: int, inputs: int) -> tuple[Spec, ...]:
        """Return what is kept from step to step beside statistics and what parts write; zeros at first."""
        return ()

    def remember(self, memory: Mapping[str, Tensor], W: Tensor) -> Mapping[str, Tensor]:
        """Return what of `memory` ``[N, *shape]`` the gradient `W` ``[N, o, i]`` renews, before it is solved."""
        return {}

    def shown(self, means: Mapping[str, Tensor], parameters: Tensor) -> Mapping[str, Tensor]:
        """Return what a pass has shown, of which a replay shows the change.

        Args:
            means: Those of `replays` ``[N, *shape]``, of one batch.
            parameters: The parameters of that pass, as blocks ``[N, o, i]``.
        """
        return {}

    def replayed(
        self, memory: Mapping[str, Tensor], before: Mapping[str, Tensor], after: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return what of `memory` ``[N, *shape]`` a replay renews.

        Args:
            memory: As it is.
            before: What `shown` returned before the optimizer's step.
            after: What it returns afterwards.
        """
        return {}

    @abstractmethod
    def observe(
        self,
        sums: Mapping[str, Tensor],
        inputs: Rows,
        gradients: Rows,
        *,
        scale: float,
        first: bool,
        held: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add what one use of a layer shows to the raw sums, in a gradient hook.

        Args:
            sums: A tensor ``[n, *shape]`` for each of `statistics`, in a replay for each of `replays`; uninitialised
                memory when `first`. Where those of `early` have intervals of their own, either they or all others may
                be missing.
            inputs: The rows a, of as many samples as the loss has terms here (token losses: positions).
            gradients: The rows g of the same samples, times ``1 / scale``.
            scale: What makes `gradients` those of per-sample losses.
            first: Whether nothing was added to `sums` yet.
            held: Those of `looks` ``[n, *shape]``, as they were when the gradient came; None before the first renewal.
        """

    @abstractmethod
    def renew(
        self,
        part: str,
        averages: Mapping[str, Tensor],
        damping: float,
        before: Mapping[str, Tensor] | None = None,
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Do a part for some blocks.

        Args:
            part: The name of the part.
            averages: What the part reads ``[N, *shape]``: of statistics the running averages, bias-corrected, or
                their diagonals.
            damping: γ at this renewal.
            before: What a warm part has written last ``[N, *shape]``, not to be changed; None: it never has.

        Returns:
            The tensors that the part writes ``[N, *shape]``, and whether each block succeeded ``[N]`` (bool).
        """

    @abstractmethod
    def solve(self, held: Mapping[str, Tensor], W: Tensor, damping: float) -> Tensor:
        """Return the preconditioned gradient ``[N, o, i]`` of `W` ``[N, o, i]``.

        Args:
            held: All that the parts wrote, what is in `memory`, and of `live` statistics the bias-corrected averages.
            W: The gradient; it may be overwritten no more than `held`.
            damping: γ of this step.
        """

    def multiply(self, held: Mapping[str, Tensor], averages: Mapping[str, Tensor], D: Tensor) -> Tensor:
        """Return F D ``[N, o, i]``, without damping, for blocks D ``[N, o, i]``; where there are `multiplies`.

        Args:
            held: That of `solve`.
            averages: Those of `multiplies` ``[N, *shape]``, bias-corrected.
            D: What a step does to the parameters, say.
        """
        raise NotImplementedError

    def diagonal(self, averages: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        """Return an estimate of the diagonal of the Fisher block, for where all else has failed.

        Args:
            averages: The bias-corrected running averages of `diagonals` ``[N, *shape]``.
            outputs: o.
            inputs: i.

        Returns:
            ``[N, o, i]``, or what broadcasts to it.
        """
        raise NotImplementedError

    def trace(self, averages: Mapping[str, Tensor], outputs: int) -> Tensor:
        """Return the trace of each Fisher block ``[N]``, as it is approximated and without damping.

        Args:
            averages: Those of `traced`, as in `renew`.
            outputs: o.
        """
        raise NotImplementedError

    def misfit(self, averages: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> Sequence[tuple[Tensor, Tensor]]:
        """Return ``‖offdiag(Qᵀ X Q)‖²`` and ``‖X‖²`` of each block ``[N]``, for each factor X with eigenvectors Q.

        Args:
            averages: Those of `rotated`, as in `renew`.
            held: All that the parts wrote.
        """
        raise NotImplementedError


def check_estimate(
    fisher: object, factor_decay: object, likelihood: str | Likelihood | None
) -> tuple[float, Likelihood | None]:
    """Check what is common to every curvature, and return `factor_decay` and the likelihood.

    Args:
        fisher: "empirical" or "sampled".
        factor_decay: The weight of the old in running averages.
        likelihood: What sampled labels are drawn from.

    Raises:
        ValueError: if one of them is not allowed.
    """
    require_one_of("fisher", fisher, "empirical", "sampled")
    require(is_number(factor_decay) and 0 <= factor_decay < 1, "factor_decay", factor_decay, "a number in [0, 1)")
    require(
        (likelihood is not None) == (fisher == "sampled"),
        "likelihood",
        likelihood,
        "given with fisher='sampled' ('categorical', 'bernoulli', 'gaussian') and left out otherwise",
    )
    return float(factor_decay), None if likelihood is None else resolve(likelihood)  # type: ignore[arg-type]
