"""EKFAC: K-FAC's eigenbasis with the second moments measured in it (George et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from natgrad.curvature.base import Curvature
from natgrad.curvature.kfac import KFAC
from natgrad.curvature.likelihood import Likelihood
from natgrad.curvature.moments import add_moments_
from natgrad.layers import Layer, Rows
from natgrad.specs import Statistic, Task


class EKFAC(KFAC):
    """Eigenvalue-corrected Kronecker-factored curvature, ``F ≈ (Q_G ⊗ Q_A) diag(S) (Q_G ⊗ Q_A)ᵀ``.

    Q_A and Q_G are the eigenvectors of K-FAC's factors A and G, and S = E_n[(Q_Gᵀ ∇_n Q_A)∘²] are the mean squares of
    per-sample gradients ∇_n = Σ_t g aᵀ in their basis (George et al. 2018). Of all diagonals S is the nearest to F in
    the Frobenius norm; v_G v_Aᵀ, K-FAC's, is another.

    **The life of S.** It is measured at each capture, at as many multiply-adds as rotating every sample's rows takes,
    and its running average begins anew with each new basis, with a bias correction of its own. Until the first capture
    after that the eigenvalues are K-FAC's. So the interval of the inverses should be several times that of the factors:
    with ``Refresh(factors=1, inverses=1)`` S is never used, and EKFAC is K-FAC. Under placement "background" a step
    that takes over a new basis has seen its samples in the old one: they do not count in S.

    **Uses.** A layer that is used several times in one backward pass (recurrent cells, shared modules) adds the squares
    of each use, without products of two uses; with sharing="reduce" uses are pooled first.

    **The basis** is unique only where eigenvalues differ. Within a null space, which factors of few samples have, S
    depends on the eigenvectors that were found: ranks share theirs to the last bit, but runs that differ by rounding
    may part.

    Embeddings, alone or tied with linear layers, have K-FAC's form, whose basis leaves nothing to measure: a lookup is
    a unit vector. Norm layers have `UnitWise`.
    """

    def __init__(
        self,
        *,
        fisher: Literal["empirical", "sampled"] = "empirical",
        sharing: Literal["expand", "reduce"] = "expand",
        factor_decay: float = 0.95,
        likelihood: str | Likelihood | None = None,
        max_factor_size: int | None = 8192,
        wide: Literal["diagonal", "blocks", "optimizer"] = "diagonal",
    ) -> None:
        """Choose the variant.

        Args:
            fisher: "empirical": g from the true labels. "sampled": g from labels drawn from the model's own
                prediction, in one more backward pass; use ``preconditioner.backward(loss, outputs)``.
            sharing: How positions of a shared weight combine in A and G. "expand": ∇_n is a sample's gradient as it is.
                "reduce" (Eschenhagen 2023): it is taken to be (Σ_t g)(mean_t a)ᵀ, which is cheaper, and exact where
                reduce is.
            factor_decay: The weight of the old in the running averages, in [0, 1).
            likelihood: For the sampled Fisher: "categorical", "bernoulli", "gaussian" or a `Likelihood`.
            max_factor_size: As of `KFAC`.
            wide: As of `KFAC`; the eigenvectors of a diagonal side are the unit vectors.

        Raises:
            ValueError: if an argument is not allowed.
        """
        super().__init__(
            fisher=fisher,
            sharing=sharing,
            factor_decay=factor_decay,
            likelihood=likelihood,
            max_factor_size=max_factor_size,
            wide=wide,
        )
        self._tables = KFAC(
            fisher=fisher,
            sharing=sharing,
            factor_decay=factor_decay,
            likelihood=likelihood,
            max_factor_size=max_factor_size,
            wide=wide,
        )

    def _options(self) -> list[str]:
        return [f"fisher={self.fisher!r}", f"sharing={self.sharing!r}"]

    def variant_for(self, layer: Layer) -> Curvature | str:
        """Choose as `KFAC` does, whose form embeddings and what is tied with them keep."""
        one_hot = any(each.form == "one-hot" for each in (layer, *layer.others))
        return self._tables.variant_for(layer) if one_hot else super().variant_for(layer)

    @property
    def _bases(self) -> tuple[str, ...]:
        """The names of the eigenvectors, of those sides that have any but unit vectors."""
        return tuple(f"Q{name}" for name in self.off_diagonal_reads or ())

    def statistics(self, d_out: int, d_in: int) -> tuple[Statistic, ...]:
        """Return beside A and G the second moments S, and s, the share of rows that they are of.

        s is 1 where S was measured and 0 where there was no basis yet, so that S / s of their running averages is
        bias-corrected since S began, however old those of A and G are.
        """
        shape = self.G.eigenvalues(d_out), self.A.eigenvalues(d_in)
        S = Statistic(
            "S", shape, source="both", gradient_power=2, needs_computed=self._bases, used_by_precondition=True
        )
        s = replace(S, name="s", shape=(1,), per="position", gradient_power=0, counts_positions=True)
        return *super().statistics(d_out, d_in), S, s

    def tasks(self, d_out: int, d_in: int) -> tuple[Task, ...]:
        """Return the tasks of K-FAC; with a new basis S is measured anew."""
        tasks = super().tasks(d_out, d_in)
        return tuple(replace(task, restarts=("S", "s")) if f"Q{task.name}" in self._bases else task for task in tasks)

    @override
    def accumulate(
        self,
        sums: Mapping[str, Tensor],
        inputs: Rows,
        gradients: Rows,
        scale: float,
        computed: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().accumulate(sums, inputs, gradients, scale)
        if "S" not in sums:
            return
        if computed is None and self._bases:
            return  # there is no basis yet
        add_moments_(sums["S"], inputs, gradients, self.A, self.G, computed or {}, scale=scale * scale)
        sums["s"].add_(float(gradients.samples * gradients.positions))

    def spectrum(self, computed: Mapping[str, Tensor]) -> Tensor:
        """Return S once it was measured in this basis, before that the eigenvalues of K-FAC."""
        S, s = computed["S"], computed["s"][:, :, None]
        measured = s > 0
        # Rounding to a narrow dtype may leave a mean of squares below 0.
        return torch.where(measured, S.clamp(min=0) / torch.where(measured, s, 1), super().spectrum(computed))
