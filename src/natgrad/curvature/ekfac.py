"""EKFAC: K-FAC's eigenbasis with the second moments measured in it (George et al. 2018)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from natgrad.curvature.base import Curvature
from natgrad.curvature.kfac import KFAC
from natgrad.curvature.likelihood import Likelihood
from natgrad.curvature.sides import Side
from natgrad.errors import with_suggestions
from natgrad.layers import Layer, Rows
from natgrad.linalg.device import on_host
from natgrad.printed import changed
from natgrad.specs import Statistic, Task, Tensors


class EKFAC(KFAC):
    """Eigenvalue-corrected Kronecker-factored curvature, ``F ≈ (Q_G ⊗ Q_A) diag(S) (Q_G ⊗ Q_A)ᵀ``.

    Q_A and Q_G are the eigenvectors of K-FAC's factors A and G, and S = E_n[(Q_Gᵀ ∇_n Q_A)∘²] are the mean squares of
    per-sample gradients ∇_n = Σ_t g aᵀ in this basis (George et al. 2018). No other diagonal is nearer to F in the
    Frobenius norm; K-FAC uses v_G v_Aᵀ.

    **Interval.** S is measured whenever factors are due, which costs as much as rotating every sample's rows. Its
    running average restarts with each new basis; until the first measurement in that basis the eigenvalues are K-FAC's.
    So the interval of the inverses should be several times that of the factors: with
    ``Refresh(factors=1, inverses=1)`` S is never used, and EKFAC equals K-FAC. With placement "background" the samples
    of the step that switches to a new basis are not added to S.

    **Repeated use.** A layer that is used several times in one backward pass (recurrent cells, shared modules) adds the
    squares of each use, without cross terms; with sharing="reduce" uses are pooled first.

    **Basis.** It is unique only where eigenvalues differ. Within the null space of a factor of few samples, S depends
    on the eigenvectors found: all ranks use the same ones, but runs that differ by rounding may diverge.

    Embeddings, alone or tied with linear layers, use K-FAC, because the basis of one-hot inputs is exact. Norm layers
    use `UnitWise`.
    """

    @with_suggestions
    def __init__(
        self,
        *,
        fisher: Literal["empirical", "sampled"] = "empirical",
        sharing: Literal["expand", "reduce"] = "expand",
        factor_decay: float = 0.95,
        likelihood: str | Likelihood | None = None,
        max_factor_size: int | None = 8192,
        wide: Literal["diagonal", "optimizer"] = "diagonal",
    ) -> None:
        """Choose the variant.

        Args:
            fisher: "empirical": g from the true labels. "sampled": g from labels drawn from the model's own
                prediction, in one more backward pass; use ``preconditioner.backward(loss, outputs)``.
            sharing: How positions of a shared weight combine in A and G. "expand": ∇_n is a sample's gradient. "reduce"
                (Eschenhagen 2023): ∇_n is approximated by (Σ_t g)(mean_t a)ᵀ, which is cheaper.
            factor_decay: The weight of the old value in the running averages, in [0, 1).
            likelihood: For the sampled Fisher: "categorical", "bernoulli", "gaussian" or a `Likelihood`.
            max_factor_size: As in `KFAC`.
            wide: As in `KFAC`; the eigenvectors of a diagonal factor are the unit vectors.

        Raises:
            ValueError: if an argument is not allowed.
        """
        options: dict[str, Any] = {
            "fisher": fisher,
            "sharing": sharing,
            "factor_decay": factor_decay,
            "likelihood": likelihood,
            "max_factor_size": max_factor_size,
            "wide": wide,
        }
        super().__init__(**options)
        self._tables = KFAC(**options)

    def _options(self) -> list[str]:
        others = changed(self, EKFAC, "factor_decay", "likelihood", "max_factor_size", "wide")
        return [f"fisher={self.fisher!r}", f"sharing={self.sharing!r}", *others]

    def variant_for(self, layer: Layer) -> Curvature | str | None:
        """Return the variant for `layer`; for embeddings, also tied with linear layers, that of `KFAC`."""
        one_hot = any(member.form == "one-hot" for member in (layer, *layer.others))
        return self._tables.variant_for(layer) if one_hot else super().variant_for(layer)

    @property
    def _bases(self) -> tuple[str, ...]:
        """The names of the eigenvector tensors; diagonal factors have none."""
        return tuple(f"Q{name}" for name, side in (("A", self.A), ("G", self.G)) if side.full)

    def statistics(self, d_out: int, d_in: int) -> tuple[Statistic, ...]:
        """Return A, G, the second moments S, and s, the share of rows that S was measured on.

        s is 1 where S was measured and 0 before the first basis, so that the ratio S / s of the running averages is
        bias-corrected from the start of S.
        """
        S = Statistic(
            "S",
            (d_out, d_in),
            source="both",
            gradient_power=2,
            needs_computed=self._bases,
            used_by_precondition=True,
            nonnegative=True,
        )
        s = replace(S, name="s", shape=(1,), per="position", gradient_power=0, counts_positions=True)
        return *super().statistics(d_out, d_in), S, s

    def tasks(self, d_out: int, d_in: int) -> tuple[Task, ...]:
        """Return the tasks of K-FAC; a new basis restarts S."""
        tasks = super().tasks(d_out, d_in)
        return tuple(replace(task, restarts=("S", "s")) if f"Q{task.name}" in self._bases else task for task in tasks)

    @override
    def accumulate(
        self, sums: Tensors, inputs: Rows, gradients: Rows, scale: float, computed: Tensors | None = None
    ) -> None:
        super().accumulate(sums, inputs, gradients, scale)
        if "S" not in sums:
            return
        if computed is None and self._bases:
            return  # there is no basis yet
        add_moments_(sums["S"], inputs, gradients, self.A, self.G, computed or {}, scale=scale * scale)
        sums["s"].add_(float(gradients.samples * gradients.positions))

    def spectrum(self, computed: Tensors) -> Tensor:
        """Return S if it was measured in this basis, otherwise the eigenvalues of K-FAC."""
        S, s = computed["S"], computed["s"][:, :, None]
        measured = s > 0
        # Rounding to a narrow dtype may leave a mean of squares below 0.
        return torch.where(measured, S.clamp(min=0) / torch.where(measured, s, 1), super().spectrum(computed))


_HOST_PIECE, _ACCELERATOR_PIECE = 1 << 20, 1 << 24
"""About how many elements of rows and per-sample gradients are processed at once: to fit a cache, or to fill a GPU."""


def add_moments_(
    S: Tensor, inputs: Rows, gradients: Rows, A: Side, G: Side, computed: Tensors, *, scale: float
) -> None:
    """Add `scale` Σ_n (Q_Gᵀ ∇_n Q_A)∘² to S, with ∇_n = Σ_t g aᵀ a sample's gradient (George et al. 2018).

    With one position per sample that is ((g Q_G)∘²)ᵀ (a Q_A)∘². With T positions each sample's gradient is formed
    before it is squared, and each side is rotated either before that (T d² multiply-adds) or after it (r d², with r the
    size of the other side), whichever is cheaper. S ``[n, o, i]`` has one element per eigenvalue; `computed` holds the
    eigenvectors of the sides A and G.
    """
    T = inputs.positions
    o, i = S.shape[1:]
    size = len(S) * (T * (o + i) + (o * i if T > 1 else 0))
    step = max(1, (_HOST_PIECE if on_host(S) else _ACCELERATOR_PIECE) // size)
    for start in range(0, inputs.samples, step):
        stop = min(start + step, inputs.samples)
        a_rows, g = inputs.part(start, stop), gradients.part(start, stop).dense().to(S.dtype)  # [n, B, T, d]
        if T == 1:
            a, g = A.rotate(a_rows.dense().to(S.dtype)[:, :, 0], computed, "A"), G.rotate(g[:, :, 0], computed, "G")
            S.baddbmm_(g.square().mT, a.square(), alpha=scale)
            continue
        rotate_a_first, rotate_g_first = o >= T, i >= T
        if rotate_g_first:
            g = _rotated(g, G, computed, "G")
        if rotate_a_first:
            gradient = g.mT @ _rotated(a_rows.dense().to(S.dtype), A, computed, "A")  # [n, B, o, i]
        else:
            gradient = _rotated(a_rows.outer(g), A, computed, "A")
        if not rotate_g_first:
            gradient = _rotated(gradient.mT, G, computed, "G").mT
        S.add_(gradient.square_().sum(1), alpha=scale)


def _rotated(rows: Tensor, side: Side, computed: Tensors, name: str) -> Tensor:
    """Return ``rows [n, B, r, d]`` in the eigenbasis of a side."""
    rotated: Tensor = side.rotate(rows.flatten(1, 2), computed, name).unflatten(1, rows.shape[1:3])
    return rotated
