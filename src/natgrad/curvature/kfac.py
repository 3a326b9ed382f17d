"""K-FAC: F ≈ G ⊗ A (Martens & Grosse 2015; Grosse & Martens 2016; Pauloski 2022)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from natgrad import linalg
from natgrad.curvature.base import Curvature, Part, Spec, check_estimate
from natgrad.curvature.sides import Blocks, Diagonal, Full, Side
from natgrad.curvature.tables import TableKFAC
from natgrad.errors import require
from natgrad.layers import Layer, Rows
from natgrad.likelihood import Likelihood

if TYPE_CHECKING:
    from typing_extensions import Self

# Eigenvectors cost four to six Cholesky inverses.
_EIGEN = 5.0


class KFAC(Curvature):
    """Kronecker-factored curvature.

    ``A = (1/B) Σ_n Σ_t a aᵀ`` and ``G = (1/(B T)) Σ_n Σ_t g gᵀ`` over samples n and positions t (SPEC 1). A side that
    is too wide for a full factor, a vocabulary's, is kept as its diagonal or as blocks along it.

    Attributes:
        A: What is kept of the factor of the inputs.
        G: What is kept of the factor of the outputs.
    """

    def __init__(
        self,
        *,
        form: Literal["eigen", "inverse"] = "eigen",
        fisher: Literal["empirical", "sampled"] = "empirical",
        sharing: Literal["expand", "reduce"] = "expand",
        factor_decay: float = 0.95,
        likelihood: str | Likelihood | None = None,
        pi: bool = True,
        max_factor_size: int | None = 8192,
        wide: Literal["diagonal", "blocks", "optimizer"] = "diagonal",
    ) -> None:
        """Choose the variant.

        Args:
            form: "eigen": (G ⊗ A + γI)⁻¹ exactly, with the damping of the step. "inverse": damped Cholesky inverses of
                A and G, cheaper to renew and to apply, with the damping of their renewal.
            fisher: "empirical": g from the true labels. "sampled": g from labels drawn from the model's own
                prediction, in one more backward pass; use ``preconditioner.backward(loss, outputs)``.
            sharing: How positions of a shared weight combine, "expand" or "reduce" (Eschenhagen 2023).
            factor_decay: The weight of the old in the running averages, in [0, 1).
            likelihood: For the sampled Fisher: "categorical", "bernoulli", "gaussian" or a `Likelihood`.
            pi: Whether the inverse form balances the damping between A and G by their traces. False: γ on both
                (Pauloski 2022, eq. 9-10).
            max_factor_size: The most inputs (with the bias's constant 1) or outputs of a layer that get a full factor;
                None: any number.
            wide: What becomes of a side with more. "diagonal": second moments alone. "blocks": square blocks along the
                diagonal, as few and as equal as that size allows (THOR). "optimizer": the layer is left out.

        Raises:
            ValueError: if an argument is none of those.
        """
        require(form in ("eigen", "inverse"), "form", form, "'eigen' or 'inverse'")
        require(sharing in ("expand", "reduce"), "sharing", sharing, "'expand' or 'reduce'")
        require(isinstance(pi, bool), "pi", pi, "True or False")
        whole = isinstance(max_factor_size, int) and not isinstance(max_factor_size, bool)
        fits = max_factor_size is None or (whole and max_factor_size >= 1)
        require(fits, "max_factor_size", max_factor_size, "a whole number >= 1, or None")
        require(wide in ("diagonal", "blocks", "optimizer"), "wide", wide, "'diagonal', 'blocks' or 'optimizer'")
        self.form, self.fisher, self.sharing, self.pi = form, fisher, sharing, pi
        self._factor_decay, self.likelihood = check_estimate(fisher, factor_decay, likelihood)
        self.pools = sharing == "reduce"
        self.early = () if self.pools else ("A",)
        self.max_factor_size, self.wide = max_factor_size, wide
        self.A: Side = Full()
        self.G: Side = Full()
        self._variants: dict[object, Curvature] = {}

    def __repr__(self) -> str:
        """Show the variant."""
        return self.describe(A=self.A, G=self.G)

    def describe(self, *notes: str, **sides: Side) -> str:
        """Return the options in words, with what is kept of each side where that is not all, and `notes`."""
        kept = [f"{name} {side}" for name, side in sides.items() if str(side)]
        return f"{type(self).__name__}({', '.join([*self._options(), *kept, *notes])})"

    def _options(self) -> list[str]:
        return [f"form={self.form!r}", f"fisher={self.fisher!r}", f"sharing={self.sharing!r}"]

    @property
    def factor_decay(self) -> float:
        """See `Curvature.factor_decay`."""
        return self._factor_decay

    def fit(self, layer: Layer) -> Curvature | str:
        """See `Curvature.fit`: the sides by their sizes; embeddings, also tied with linear layers, as a `TableKFAC`."""
        if layer.form == "elementwise":
            return super().fit(layer)
        uses = {each.form for each in (layer, *layer.others)}
        A = self._side(layer.inputs)
        G = self._side(layer.outputs) if "matrix" in uses else Diagonal()
        if A is None or G is None:
            widest = layer.inputs if A is None else layer.outputs
            return f"{widest} wide, more than max_factor_size={self.max_factor_size}, and wide='optimizer'"
        key = (A, G, *sorted(uses))
        if key not in self._variants:
            variant = self._with_sides(A, G)
            self._variants[key] = variant if uses == {"matrix"} else TableKFAC(variant, heads="matrix" in uses)
        return self._variants[key]

    def _side(self, size: int) -> Side | None:
        most = self.max_factor_size
        if most is None or size <= most:
            return Full()
        if self.wide == "blocks":
            return Blocks(size, ceil(size / most))
        return Diagonal() if self.wide == "diagonal" else None

    def _with_sides(self, A: Side, G: Side) -> Self:
        if A == G == Full():
            return self
        variant = copy.copy(self)
        variant.A, variant.G, variant._variants = A, G, {}
        return variant

    def statistics(self, outputs: int, inputs: int) -> tuple[Spec, ...]:
        """See `Curvature.statistics`: the factors A, a mean over samples, and G, one over all rows."""
        return (
            self.A.statistic("A", inputs, mean="samples", degree=0),
            self.G.statistic("G", outputs, mean="rows", degree=2),
        )

    def parts(self, outputs: int, inputs: int) -> tuple[Part, ...]:
        """See `Curvature.parts`: A and G apart, so that two ranks can share a layer (Pauloski 2022, section 5.2.1)."""
        balanced = self.form == "inverse" and self.pi
        return tuple(
            Part(
                name=name,
                reads=("A", "G") if balanced else (name,),
                writes=side.writes(self.form, name, size),
                cost=side.cost(size) * (_EIGEN if self.form == "eigen" else 1.0),
                repeated=side.repeated(self.form),
            )
            for name, side, size in (("A", self.A, inputs), ("G", self.G, outputs))
        )

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
        """See `Curvature.observe`."""
        if "A" in sums:
            self.A.add_(sums["A"], inputs, scale=1.0, overwrite=first)
        self.G.add_(sums["G"], gradients, scale=scale * scale, overwrite=first)

    def observe_inputs(self, sums: Mapping[str, Tensor], inputs: Rows) -> None:
        """See `Curvature.observe_inputs`: A."""
        self.A.add_(sums["A"], inputs, scale=1.0, overwrite=True)

    def renew(
        self,
        part: str,
        averages: Mapping[str, Tensor],
        damping: float,
        columns: slice | None = None,
        before: Mapping[str, Tensor] | None = None,
    ) -> tuple[Sequence[Tensor], Tensor]:
        """See `Curvature.renew`."""
        factor, side = averages[part], self.A if part == "A" else self.G
        if self.form == "eigen":
            return side.decompose(factor)
        share = factor.new_full((len(factor),), damping)
        if self.pi:
            means = self.A.mean_eigenvalue(averages["A"]), self.G.mean_eigenvalue(averages["G"])
            pi = linalg.trace_balance(*means)
            share = damping**0.5 * (pi if part == "A" else 1 / pi)
        return side.invert(factor, share, columns)

    def solve(self, held: Mapping[str, Tensor], W: Tensor, damping: float) -> Tensor:
        """See `Curvature.solve`."""
        A, G = self.A, self.G
        if self.form == "inverse":
            if A == G == Full():
                return linalg.solve_inverse(W, held["inverse_A"], held["inverse_G"])
            return A.multiply(G.multiply(W.mT, held, "G").mT, held, "A")
        divisor = self.spectrum(held).add_(damping)
        if A == G == Full():
            return linalg.solve_rotated(W, held["QA"], held["QG"], divisor)
        rotated = A.rotate(G.rotate(W.mT, held, "G").mT, held, "A") / divisor
        return A.rotate_back(G.rotate_back(rotated.mT, held, "G").mT, held, "A")

    def spectrum(self, held: Mapping[str, Tensor]) -> Tensor:
        """Return the eigenvalues of the block, in memory of its own ``[N, o, i]``: v_G v_Aᵀ (eigen form)."""
        return held["vG"][:, :, None] * held["vA"][:, None, :]
