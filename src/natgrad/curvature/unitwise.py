"""Unit-wise curvature of elementwise layers: a small dense block for each channel (Osawa 2020, SP-NGD)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from natgrad import linalg
from natgrad.curvature.base import Curvature, Part, Spec, check_estimate
from natgrad.errors import require_one_of
from natgrad.layers import Layer, Rows
from natgrad.sampling.likelihood import Likelihood

_CHUNK = 2**16
"""About how many gradients are squared at once: as many as the cache holds."""


class UnitWise(Curvature):
    """The Fisher of norm layers, ``F = (1/B) Σ_n u uᵀ`` over samples n.

    u holds a sample's gradients ``(Σ_t g·x̂, Σ_t g)`` of the weights and then of the biases of C channels, summed over
    positions t and over all uses of the layer in one backward pass. What couples the channels is kept or left out by
    the form.
    """

    pools = True
    diagonals = ("F",)

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
            form: "full": the whole ``[2C, 2C]`` matrix, inverted with the damping of its renewal. "unit": weight and
                bias of a channel together, ``[2, 2]`` each, in closed form. "diag": each coefficient by itself. The
                last two have nothing to decompose and take the damping of the step.
            fisher: "empirical": g from the true labels. "sampled": g from labels drawn from the model's own
                prediction, in one more backward pass; use ``preconditioner.backward(loss, outputs)``.
            factor_decay: The weight of the old in the running average, in [0, 1).
            likelihood: For the sampled Fisher: "categorical", "bernoulli", "gaussian" or a `Likelihood`.

        Raises:
            ValueError: if an argument is none of those.
        """
        require_one_of("form", form, "full", "unit", "diag")
        self.form, self.fisher = form, fisher
        self.multiplies = ("F",) if form == "full" else ()
        self._factor_decay, self.likelihood = check_estimate(fisher, factor_decay, likelihood)

    def __repr__(self) -> str:
        """Show the variant."""
        return f"UnitWise(form={self.form!r}, fisher={self.fisher!r})"

    @property
    @override
    def factor_decay(self) -> float:
        return self._factor_decay

    def fit(self, layer: Layer) -> Curvature | str:
        """See `Curvature.fit`: it has no form for matrices."""
        return (
            self if layer.form == "elementwise" else f"{self!r} is for norm layers, not {type(layer.module).__name__}"
        )

    def statistics(self, outputs: int, inputs: int) -> tuple[Spec, ...]:
        """See `Curvature.statistics`: F, or what of it is kept.

        Without "full" that is, for each channel, the mean squares of its i coefficients, then for "unit" the mean
        product of the two if there are two.
        """
        return (self._spec("F", outputs, inputs),)

    @override
    def parts(self, outputs: int, inputs: int) -> tuple[Part, ...]:
        name = "inverse" if self.form == "full" else "fisher"
        written = self._spec(name, outputs, inputs)
        cost = float(outputs * inputs) ** 3 if self.form == "full" else float(written.numel)
        return (Part(name="F", reads=("F",), writes=(written,), cost=cost),)

    @override
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
        total = sums["F"]
        if self.form == "full":
            gradients.add_gram_(total, scale=scale * scale, overwrite=first)
            return
        outputs = total.shape[1]
        if first:
            total.zero_()
        for some in gradients.dense().flatten(1, 2).split(max(1, _CHUNK // outputs), 1):
            u = some.to(total.dtype).unflatten(-1, (-1, outputs))  # [n, ·, i, C]
            squares = u.square().sum(1).mT
            total[..., : u.shape[2]].add_(squares, alpha=scale * scale)
            if total.shape[2] > u.shape[2]:
                total[..., -1].add_((u[:, :, 0] * u[:, :, 1]).sum(1), alpha=scale * scale)

    @override
    def renew(
        self,
        part: str,
        averages: Mapping[str, Tensor],
        damping: float,
        before: Mapping[str, Tensor] | None = None,
    ) -> tuple[Sequence[Tensor], Tensor]:
        F = averages["F"]
        if self.form == "full":
            inverse, fine = linalg.damped_inverse(F, F.new_full((len(F),), damping))
            return (inverse,), fine
        return (F,), torch.ones(len(F), dtype=torch.bool, device=F.device)

    @override
    def solve(self, held: Mapping[str, Tensor], W: Tensor, damping: float) -> Tensor:
        if self.form == "full":
            columns = W.mT.flatten(1)[:, :, None]
            return linalg.product(held["inverse"], columns).view_as(W.mT).mT
        F = held["fisher"]
        return W / (F + damping) if F.shape == W.shape else linalg.solve_pairs(W, F, damping)

    @override
    def multiply(self, held: Mapping[str, Tensor], averages: Mapping[str, Tensor], D: Tensor) -> Tensor:
        if self.form == "full":
            return (averages["F"] @ D.mT.flatten(1)[:, :, None]).view_as(D.mT).mT
        F = held["fisher"]
        return D * F if F.shape == D.shape else linalg.multiply_pairs(D, F)

    @override
    def diagonal(self, averages: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        F = averages["F"]
        if self.form != "full":
            return F[..., :inputs]
        diagonal: Tensor = F.diagonal(dim1=-2, dim2=-1).unflatten(-1, (inputs, outputs))
        return diagonal.mT

    traced = ("F",)

    def trace(self, averages: Mapping[str, Tensor], outputs: int) -> Tensor:
        """See `Curvature.trace`: the sum of the mean squares."""
        F = averages["F"]
        if self.form == "full":
            return F.diagonal(dim1=-2, dim2=-1).sum(-1)
        squares = F if self.form == "diag" else F[..., : (F.shape[-1] + 1) // 2]
        return squares.flatten(1).sum(1)

    def _spec(self, name: str, outputs: int, inputs: int) -> Spec:
        if self.form == "full":
            return Spec(name=name, shape=(outputs * inputs,) * 2, symmetric=True, mean="samples", degree=2)
        pairs = inputs - 1 if self.form == "unit" else 0
        return Spec(name=name, shape=(outputs, inputs + pairs), mean="samples", degree=2)
