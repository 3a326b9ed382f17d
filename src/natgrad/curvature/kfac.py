"""K-FAC: F ≈ G ⊗ A (Martens & Grosse 2015; Grosse & Martens 2016; Pauloski 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from natgrad import linalg
from natgrad.curvature.base import Curvature, Part, Spec
from natgrad.errors import require
from natgrad.layers import Rows
from natgrad.likelihood import Likelihood, resolve


class KFAC(Curvature):
    """Kronecker-factored curvature.

    ``A = (1/B) Σ_n Σ_t a aᵀ`` and ``G = (1/(B T)) Σ_n Σ_t g gᵀ`` over samples n and positions t (SPEC 1).
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

        Raises:
            ValueError: if an argument is none of those.
        """
        require(form in ("eigen", "inverse"), "form", form, "'eigen' or 'inverse'")
        require(fisher in ("empirical", "sampled"), "fisher", fisher, "'empirical' or 'sampled'")
        require(sharing in ("expand", "reduce"), "sharing", sharing, "'expand' or 'reduce'")
        number = isinstance(factor_decay, (int, float)) and not isinstance(factor_decay, bool)
        require(number and 0 <= factor_decay < 1, "factor_decay", factor_decay, "a number in [0, 1)")
        require(isinstance(pi, bool), "pi", pi, "True or False")
        sampled = fisher == "sampled"
        require(
            (likelihood is not None) == sampled,
            "likelihood",
            likelihood,
            "given with fisher='sampled' ('categorical', 'bernoulli', 'gaussian') and left out otherwise",
        )
        self.form, self.fisher, self.sharing, self.pi = form, fisher, sharing, pi
        self._factor_decay = float(factor_decay)
        self.likelihood = None if likelihood is None else resolve(likelihood)
        self.pools = sharing == "reduce"

    def __repr__(self) -> str:
        """Show the variant."""
        return f"KFAC(form={self.form!r}, fisher={self.fisher!r}, sharing={self.sharing!r})"

    @property
    def factor_decay(self) -> float:
        """See `Curvature.factor_decay`."""
        return self._factor_decay

    def statistics(self, outputs: int, inputs: int) -> tuple[Spec, ...]:
        """See `Curvature.statistics`: the factors A, a mean over samples, and G, one over all rows."""
        return (
            Spec(name="A", shape=(inputs, inputs), symmetric=True, mean="samples", degree=0),
            Spec(name="G", shape=(outputs, outputs), symmetric=True, mean="rows", degree=2),
        )

    def parts(self, outputs: int, inputs: int) -> tuple[Part, ...]:
        """See `Curvature.parts`: A and G apart, so that two ranks can share a layer (Pauloski 2022, section 5.2.1)."""
        balanced = self.form == "inverse" and self.pi
        return tuple(
            Part(
                name=side,
                reads=("A", "G") if balanced else (side,),
                writes=self._writes(side, size),
                cost=float(size) ** 3,
            )
            for side, size in (("A", inputs), ("G", outputs))
        )

    def observe(self, sums: Mapping[str, Tensor], inputs: Rows, gradients: Rows, *, scale: float, first: bool) -> None:
        """See `Curvature.observe`."""
        inputs.add_gram_(sums["A"], overwrite=first)
        gradients.add_gram_(sums["G"], scale=scale * scale, overwrite=first)

    def renew(self, part: str, averages: Mapping[str, Tensor], damping: float) -> tuple[Sequence[Tensor], Tensor]:
        """See `Curvature.renew`."""
        factor = averages[part]
        if self.form == "eigen":
            values, vectors, fine = linalg.eigh(factor)
            return (vectors, values), fine
        share = factor.new_full((len(factor),), damping)
        if self.pi:
            pi = linalg.trace_balance(averages["A"], averages["G"])
            share = damping**0.5 * (pi if part == "A" else 1 / pi)
        inverse, fine = linalg.damped_inverse(factor, share)
        return (inverse,), fine

    def solve(self, held: Mapping[str, Tensor], W: Tensor, damping: float) -> Tensor:
        """See `Curvature.solve`."""
        if self.form == "eigen":
            return linalg.solve_eigen(W, held["QA"], held["vA"], held["QG"], held["vG"], damping)
        return linalg.solve_inverse(W, held["inverse_A"], held["inverse_G"])

    def _writes(self, side: str, size: int) -> tuple[Spec, ...]:
        if self.form == "eigen":
            return (Spec(name=f"Q{side}", shape=(size, size)), Spec(name=f"v{side}", shape=(size,)))
        return (Spec(name=f"inverse_{side}", shape=(size, size), symmetric=True),)
