"""Unit-wise curvature of elementwise layers: a small dense block for each channel (Osawa 2020, SP-NGD)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from natgrad import linalg
from natgrad.curvature.base import Curvature, check_estimate
from natgrad.curvature.likelihood import Likelihood
from natgrad.errors import require_one_of, with_suggestions
from natgrad.layers import Layer, Rows
from natgrad.printed import changed
from natgrad.specs import Statistic, Task, Tensors, TensorSpec

FORMS = ("full", "unit", "diag")
"""The forms of `UnitWise`."""


class UnitWise(Curvature):
    """The Fisher of norm layers, ``F = (1/B) Σ_n u uᵀ`` over samples n.

    u holds a sample's gradients ``(Σ_t g·x̂, Σ_t g)`` of the weights and then of the biases of C channels, summed over
    positions t and over all uses of the layer in one backward pass.
    """

    sum_positions = True
    takes_narrow = True

    @with_suggestions
    def __init__(
        self,
        *,
        form: Literal["full", "unit", "diag"] = "unit",
        fisher: Literal["empirical", "sampled"] = "empirical",
        factor_decay: float = 0.95,
        likelihood: str | Likelihood | None = None,
    ) -> None:
        """Choose the variant.

        Args:
            form: "full": the ``[2C, 2C]`` matrix, inverted with the damping of its refresh. "unit": a
                ``[2, 2]`` block for weight and bias of each channel, inverted in closed form. "diag": the diagonal. The
                last two use the damping of the step.
            fisher: "empirical": g from the true labels. "sampled": g from labels drawn from the model's own
                prediction, in one more backward pass; use ``preconditioner.backward(loss, outputs)``.
            factor_decay: The weight of the old value in the running average, in [0, 1).
            likelihood: For the sampled Fisher: "categorical", "bernoulli", "gaussian" or a `Likelihood`.

        Raises:
            ValueError: if an argument is not allowed.
        """
        require_one_of("form", form, *FORMS)
        self.form, self.fisher = form, fisher
        self.factor_decay, self.likelihood = check_estimate(fisher, factor_decay, likelihood)

    def __repr__(self) -> str:
        others = changed(self, UnitWise, "factor_decay", "likelihood")
        return f"UnitWise({', '.join([f'form={self.form!r}', f'fisher={self.fisher!r}', *others])})"

    def variant_for(self, layer: Layer) -> Curvature | str:
        """Return itself for norm layers."""
        return (
            self if layer.form == "elementwise" else f"{self!r} is for norm layers, not {type(layer.module).__name__}"
        )

    def statistics(self, d_out: int, d_in: int) -> tuple[Statistic, ...]:
        """Return F, or its stored part.

        Without "full" that is, for each channel, the mean squares of its coefficients, followed for "unit" by the mean
        product of weight and bias gradients, if the channel has both.
        """
        shape, symmetric = self._shape(d_out, d_in)
        return (Statistic("F", shape, symmetric=symmetric, source="both", gradient_power=2),)

    @override
    def tasks(self, d_out: int, d_in: int) -> tuple[Task, ...]:
        name = "inverse" if self.form == "full" else "fisher"
        shape, symmetric = self._shape(d_out, d_in)
        written = TensorSpec(name, shape, symmetric=symmetric)
        cost = float(d_out * d_in) ** 3 if self.form == "full" else float(written.numel)
        return (Task("F", ("F",), (written,), cost),)

    @override
    def accumulate(
        self, sums: Tensors, inputs: Rows, gradients: Rows, scale: float, computed: Tensors | None = None
    ) -> None:
        total = sums["F"]
        if self.form == "full":
            gradients.add_gram_(total, scale=scale * scale)
            return
        u = gradients.dense().flatten(1, 2).to(total.dtype).unflatten(-1, (-1, total.shape[1]))  # [n, B T, i, C]
        total[..., : u.shape[2]].add_(u.square().sum(1).mT, alpha=scale * scale)
        if total.shape[2] > u.shape[2]:
            total[..., -1].add_((u[:, :, 0] * u[:, :, 1]).sum(1), alpha=scale * scale)

    @override
    def compute(
        self, task: str, averages: Tensors, damping: float, previous: Tensors | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        F = averages["F"]
        if self.form == "full":
            inverse, fine = linalg.damped_inverse(F, F.new_full((len(F),), damping))
            return {"inverse": inverse}, fine
        return {"fisher": F}, torch.ones(len(F), dtype=torch.bool, device=F.device)

    @override
    def precondition(
        self, computed: Tensors, averages: Tensors, state: Tensors, gradient: Tensor, damping: float
    ) -> Tensor:
        if self.form == "full":
            columns = gradient.mT.flatten(1)[:, :, None]
            return linalg.product(computed["inverse"], columns).view_as(gradient.mT).mT
        F = computed["fisher"]
        return gradient / (F + damping) if F.shape == gradient.shape else linalg.solve_pairs(gradient, F, damping)

    trace_reads = ("F",)

    def trace(self, averages: Tensors, d_out: int) -> Tensor:
        """Return the sum of the mean squares."""
        F = averages["F"]
        if self.form == "full":
            return F.diagonal(dim1=-2, dim2=-1).sum(-1)
        squares = F if self.form == "diag" else F[..., : (F.shape[-1] + 1) // 2]
        return squares.flatten(1).sum(1)

    def _shape(self, d_out: int, d_in: int) -> tuple[tuple[int, int], bool]:
        """Return the shape of the stored part of F, and whether it is a symmetric matrix."""
        if self.form == "full":
            return (d_out * d_in, d_out * d_in), True
        return (d_out, d_in + (d_in - 1 if self.form == "unit" else 0)), False


def for_norms(curvature: Curvature, form: Literal["full", "unit", "diag"] = "unit") -> UnitWise:
    """Return the curvature of norm layers beside another curvature, with the same Fisher."""
    fisher: Literal["empirical", "sampled"] = "empirical" if curvature.likelihood is None else "sampled"
    return UnitWise(form=form, fisher=fisher, factor_decay=curvature.factor_decay, likelihood=curvature.likelihood)
