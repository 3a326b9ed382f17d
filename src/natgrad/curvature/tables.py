"""K-FAC of a table: an embedding's weight, which may be tied with a linear layer (the head of a language model).

A table ``[V, d]`` has one row per entry. A *lookup* with the one-hot vector x adds ``x gᵀ`` to its gradient; a use as a
*head* on inputs a adds ``g aᵀ``. Neglecting the cross terms, its Fisher block is, in row-major order::

    F ≈ D ⊗ E / t  +  G ⊗ A / T

with the means over samples D of x xᵀ (the diagonal of the token counts) and E of g gᵀ for lookups, G of g gᵀ and A of
a aᵀ for the head; t and T are the numbers of rows per sample. Each term is K-FAC of one use. t is the trace of D, which
leaves out padding; if rows are pooled over positions (*reduce*), it is counted.

**One Kronecker product.** F = Σ_k R_k ⊗ C_k is approximated by R ⊗ C with

    R = Σ_k R_k tr C_k / √τ,   C = Σ_k C_k tr R_k / √τ,   τ = Σ_k tr R_k tr C_k = tr F.

As tr R = tr C = √τ, R ⊗ C is the one product with both partial traces of F, Σ_k R_k tr C_k = √τ R and likewise for C,
and so with its trace; for a single k it equals F. R and C have equal traces, so that an inverse form without π damps
both equally.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from natgrad.curvature.base import Curvature
from natgrad.curvature.sides import Diagonal
from natgrad.layers import Rows
from natgrad.layers.rows import DenseRows
from natgrad.specs import Statistic, Task

if TYPE_CHECKING:
    from natgrad.curvature.kfac import KFAC


class TableKFAC(Curvature):
    """K-FAC of an embedding, or of an embedding and the linear layers tied with it, as one block ``[V, d]``."""

    takes_narrow = True

    def __init__(self, factors: KFAC, *, heads: bool) -> None:
        """Wrap a K-FAC.

        Args:
            factors: The K-FAC of R ⊗ C; its side A is that of the features and G that of the entries.
            heads: Whether linear layers are tied with the embedding.
        """
        self._factors, self._heads = factors, heads
        self.likelihood, self.sum_positions = factors.likelihood, factors.sum_positions
        self.factor_decay = factors.factor_decay
        names = ("D", "E", *(("t",) if self.sum_positions else ()), *(("G", "A", "T") if heads else ()))
        self.trace_reads = names

    def __repr__(self) -> str:
        """Show the variant."""
        factors = self._factors
        if self._heads:
            return factors.describe("embedding and head as one", A=factors.A, G=factors.G)
        return factors.describe(A=factors.G, G=factors.A)  # the entries are the inputs of a lookup

    def statistics(self, d_out: int, d_in: int) -> tuple[Statistic, ...]:
        """Return D, E and t of lookups, G, A and T of heads, all as means over samples."""
        entries, features = self._factors.G, self._factors.A
        # With heads, D and A come from the inputs of different uses, so neither is a statistic of all inputs.
        D = Diagonal().statistic("D", d_out, source="both" if self._heads else "inputs", per="sample", gradient_power=0)
        specs = [D, features.statistic("E", d_in, source="gradients", per="sample", gradient_power=2)]
        if self.sum_positions:
            specs.append(Statistic("t", (1,), counts_positions=True, nonnegative=True))
        if self._heads:
            specs += [
                entries.statistic("G", d_out, source="gradients", per="sample", gradient_power=2),
                features.statistic("A", d_in, source="both", per="sample", gradient_power=0),
                Statistic("T", (1,), counts_positions=True, nonnegative=True),
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

    def trace(self, averages: Mapping[str, Tensor], d_out: int) -> Tensor:
        """Return tr R · tr C, which is the trace of F."""
        return self._factors.trace(self.merged(averages), d_out)

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
        entries.diagonal(R).add_(_times(D, trace_E * share))
        return {"G": R, "A": _times(A, trace_G * head_share).add_(_times(E, trace_D * share))}


def _normalised(inputs: Rows) -> Rows:
    """Return pooled lookups as means over the positions that are not padding."""
    values = inputs.dense()
    return DenseRows(values / values.sum(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny), one_hot=True)


def _times(factor: Tensor, share: Tensor) -> Tensor:
    """Return ``factor [N, ...]`` times ``share [N]``."""
    return factor * share.view(-1, *[1] * (factor.ndim - 1))


def _reciprocal(values: Tensor) -> Tensor:
    """Return 1 / values, 0 where they are not positive."""
    return torch.where(values > 0, 1 / torch.where(values > 0, values, 1), 0)
