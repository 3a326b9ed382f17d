"""K-FAC of a table: an embedding's weight, which a linear layer (the head of a language model) may use as well.

A table ``[V, d]`` has a row for each entry. A *lookup* x of an embedding, one-hot, adds ``x gᵀ`` to its gradient; a use
as a *head* on inputs a adds ``g aᵀ``. As gradients of one parameter they are added, and so are, leaving out what one
says of the other, their blocks of the Fisher, in row-major order each::

    F ≈ D ⊗ E / t  +  G ⊗ A / T

with the means over samples D of x xᵀ, which is the diagonal of the counts of tokens, E of g gᵀ of the lookups, G of
g gᵀ and A of a aᵀ of the head; t and T are how many rows a sample shows the one and the other. This is K-FAC of either
use alone: mean moments of rows of both sides, times the number of rows. t is the trace of D, so that positions that
look up nothing (padding) count as none; where rows are pooled over positions (*reduce*), it is counted.

**One Kronecker product.** F = Σ_k R_k ⊗ C_k becomes R ⊗ C with

    R = Σ_k R_k tr C_k / √τ,   C = Σ_k C_k tr R_k / √τ,   τ = Σ_k tr R_k tr C_k = tr F.

Tracing out the right side of F gives Σ_k R_k tr C_k = √τ R. As tr R = tr C = √τ, tracing it out of R ⊗ C gives
R tr C = √τ R: the same; likewise for the left side. R ⊗ C is hence the one product that has both partial traces of F,
and so its trace; with a single k it is F. Multiplying R_k and dividing C_k by a number changes nothing. As R and C have
equal traces, an inverse form without π damps the two alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from natgrad.curvature.base import Curvature
from natgrad.curvature.narrow_sides import Diagonal
from natgrad.layers import Rows
from natgrad.layers.rows import DenseRows
from natgrad.specs import Statistic, Task

if TYPE_CHECKING:
    from natgrad.curvature.kfac import KFAC


class TableKFAC(Curvature):
    """K-FAC of an embedding, or of an embedding and the linear layers tied with it, as one block ``[V, d]``."""

    takes_narrow = True

    def __init__(self, factors: KFAC, *, heads: bool) -> None:
        """Wrap the K-FAC that solves.

        Args:
            factors: With what is kept of the sides, A that of the features and G that of the entries.
            heads: Whether linear layers are tied with the embedding.
        """
        self._factors, self._heads = factors, heads
        self.likelihood, self.sum_positions = factors.likelihood, factors.sum_positions
        self.factor_decay = factors.factor_decay
        names = ("D", "E", *(("t",) if self.sum_positions else ()), *(("G", "A", "T") if heads else ()))
        self.fisher_product_reads = names if factors.fisher_product_reads else ()
        self.diagonal_reads = self.trace_reads = names
        self.off_diagonal_reads = names if factors.off_diagonal_reads else None

    def __repr__(self) -> str:
        """Show the variant."""
        factors = self._factors
        if self._heads:
            return factors.describe("embedding and head as one", A=factors.A, G=factors.G)
        return factors.describe(A=factors.G, G=factors.A)  # of a lookup, the entries are the inputs

    def statistics(self, d_out: int, d_in: int) -> tuple[Statistic, ...]:
        """Return D, E and t of lookups, G, A and T of heads, all as means over samples."""
        entries, features = self._factors.G, self._factors.A
        # With heads the inputs of some uses show D, and those of others A: neither can be collected apart.
        D = Diagonal().statistic("D", d_out, source="both" if self._heads else "inputs", per="sample", gradient_power=0)
        specs = [D, features.statistic("E", d_in, source="gradients", per="sample", gradient_power=2)]
        if self.sum_positions:
            specs.append(Statistic("t", (1,), counts_positions=True))
        if self._heads:
            specs += [
                entries.statistic("G", d_out, source="gradients", per="sample", gradient_power=2),
                features.statistic("A", d_in, source="both", per="sample", gradient_power=0),
                Statistic("T", (1,), counts_positions=True),
            ]
        return tuple(specs)

    def tasks(self, d_out: int, d_in: int) -> tuple[Task, ...]:
        """Return the tasks of K-FAC, which read all statistics."""
        reads = tuple(spec.name for spec in self.statistics(d_out, d_in))
        return tuple(replace(task, reads=reads, diagonal_of=()) for task in self._factors.tasks(d_out, d_in))

    @override
    def accumulate(
        self,
        sums: Mapping[str, Tensor],
        inputs: Rows,
        gradients: Rows,
        scale: float,
        computed: Mapping[str, Tensor] | None = None,
    ) -> None:
        entries, features = self._factors.G, self._factors.A
        rows = float(inputs.samples * inputs.positions)
        if not inputs.one_hot:
            entries.add_(sums["G"], gradients, scale=scale * scale)
            features.add_(sums["A"], inputs, scale=1.0)
            sums["T"].add_(rows)
            return
        if self.sum_positions:
            inputs = _normalised(inputs)
            sums["t"].add_(rows)
        if "D" in sums:
            Diagonal().add_(sums["D"], inputs, scale=1.0)
        features.add_(sums["E"], gradients, scale=scale * scale)

    @override
    def compute(
        self,
        task: str,
        averages: Mapping[str, Tensor],
        damping: float,
        previous: Mapping[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        return self._factors.compute(task, self.merged(averages), damping, previous)

    @override
    def precondition(
        self,
        computed: Mapping[str, Tensor],
        averages: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        gradient: Tensor,
        damping: float,
    ) -> Tensor:
        return self._factors.precondition(computed, averages, state, gradient, damping)

    @override
    def fisher_product(
        self, computed: Mapping[str, Tensor], averages: Mapping[str, Tensor], direction: Tensor
    ) -> Tensor:
        return self._factors.fisher_product(computed, self.merged(averages) if averages else {}, direction)

    def diagonal(self, averages: Mapping[str, Tensor], d_out: int, d_in: int) -> Tensor:
        """Return the diagonal of the one Kronecker product."""
        return self._factors.diagonal(self.merged(averages), d_out, d_in)

    def trace(self, averages: Mapping[str, Tensor], d_out: int) -> Tensor:
        """Return tr R · tr C, which is the trace of F."""
        return self._factors.trace(self.merged(averages), d_out)

    @override
    def off_diagonal(
        self, averages: Mapping[str, Tensor], computed: Mapping[str, Tensor]
    ) -> Sequence[tuple[Tensor, Tensor]]:
        return self._factors.off_diagonal(self.merged(averages), computed)

    def merged(self, averages: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the factors R and C of the one Kronecker product, as G and A of K-FAC.

        Args:
            averages: The statistics ``[N, *shape]``.
        """
        entries, features = self._factors.G, self._factors.A
        D, E = averages["D"], averages["E"]
        trace_D, trace_E = D.sum(-1), features.trace(E)
        share = _reciprocal(averages["t"][:, 0] if self.sum_positions else trace_D)
        if not self._heads:
            return {"G": D, "A": _times(E, share)}
        G, A, head_share = averages["G"], averages["A"], _reciprocal(averages["T"][:, 0])
        trace_G, trace_A = entries.trace(G), features.trace(A)
        norm = _reciprocal((share * trace_D * trace_E + head_share * trace_G * trace_A).sqrt())
        share, head_share = share * norm, head_share * norm
        R = _times(G, trace_A * head_share)
        entries.add_diagonal_(R, _times(D, trace_E * share))
        return {"G": R, "A": _times(A, trace_G * head_share).add_(_times(E, trace_D * share))}


def _normalised(inputs: Rows) -> Rows:
    """Return pooled lookups as means over the positions that look up anything."""
    values = inputs.dense()
    return DenseRows(values / values.sum(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny), one_hot=True)


def _times(factor: Tensor, share: Tensor) -> Tensor:
    """Return each block of a factor ``[N, ...]`` times its number ``[N]``."""
    return factor * share.view(-1, *[1] * (factor.ndim - 1))


def _reciprocal(values: Tensor) -> Tensor:
    """Return 1 / values, and 0 where they are."""
    return torch.where(values > 0, 1 / torch.where(values > 0, values, 1), 0)
