"""Curvature of rank one: F ≈ ḡḡᵀ ⊗ āāᵀ (Eva: Zhang, Shi & Li 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from natgrad import linalg
from natgrad.curvature.base import Curvature, Part, Spec, check_estimate
from natgrad.errors import require_one_of
from natgrad.layers import Rows


class RankOne(Curvature):
    """K-FAC with each factor made of one vector: the means ā and ḡ of the rows a and g, in running averages.

    ``(ḡḡᵀ ⊗ āāᵀ + γI)⁻¹`` has a closed form (Sherman & Morrison 1950), so that nothing is decomposed, and statistics,
    memory and messages are two vectors a layer. It takes the damping of the step. Renewals cost nothing: have them at
    every step, ``Refresh(factors=1, inverses=1)``.

    Its default damping is 0.1, since it multiplies all that is orthogonal to the one vector of each layer by 1/γ.

    ḡ is the mean gradient of the loss, from the true labels. Of sampled labels the mean is zero but for chance, so that
    there is no sampled variant. Norm layers take `UnitWise` beside it.
    """

    multiplies = ()
    default_damping = 0.1
    diagonals = ("a", "g")

    def __init__(self, *, sharing: Literal["expand", "reduce"] = "expand", factor_decay: float = 0.95) -> None:
        """Choose the variant.

        Args:
            sharing: How positions of a shared weight combine. "expand": ā and ḡ are means over all positions of all
                samples (Zhang 2023). "reduce": over samples, of which a is averaged and g summed over positions
                (Eschenhagen 2023).
            factor_decay: The weight of the old in the running averages, in [0, 1).

        Raises:
            ValueError: if an argument is none of those.
        """
        require_one_of("sharing", sharing, "expand", "reduce")
        self.sharing, self.pools = sharing, sharing == "reduce"
        self._factor_decay, self.likelihood = check_estimate("empirical", factor_decay, None)

    def __repr__(self) -> str:
        """Show the variant."""
        return f"RankOne(sharing={self.sharing!r})"

    @property
    @override
    def factor_decay(self) -> float:
        return self._factor_decay

    def statistics(self, outputs: int, inputs: int) -> tuple[Spec, ...]:
        """See `Curvature.statistics`: ā and ḡ, means over all rows."""
        return (
            Spec(name="a", shape=(inputs,), mean="rows"),
            Spec(name="g", shape=(outputs,), mean="rows", degree=1),
        )

    def parts(self, outputs: int, inputs: int) -> tuple[Part, ...]:
        """See `Curvature.parts`: one that hands on what there is."""
        written = (Spec(name="mean_a", shape=(inputs,)), Spec(name="mean_g", shape=(outputs,)))
        return (Part(name="ag", reads=("a", "g"), writes=written, cost=float(outputs + inputs)),)

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
        for name, rows, factor in (("a", inputs, 1.0), ("g", gradients, scale)):
            total = rows.pool().sum(1).to(sums[name].dtype).mul_(factor)
            sums[name].copy_(total) if first else sums[name].add_(total)

    @override
    def renew(
        self,
        part: str,
        averages: Mapping[str, Tensor],
        damping: float,
        before: Mapping[str, Tensor] | None = None,
    ) -> tuple[Sequence[Tensor], Tensor]:
        a, g = averages["a"], averages["g"]
        return (a, g), torch.ones(len(a), dtype=torch.bool, device=a.device)

    traced = ("a", "g")

    def trace(self, averages: Mapping[str, Tensor], outputs: int) -> Tensor:
        """See `Curvature.trace`: ``‖ā‖² ‖ḡ‖²``."""
        return averages["a"].square().sum(-1) * averages["g"].square().sum(-1)

    @override
    def solve(self, held: Mapping[str, Tensor], W: Tensor, damping: float) -> Tensor:
        return linalg.solve_rank_one(W, held["mean_a"], held["mean_g"], damping)

    def multiply(self, held: Mapping[str, Tensor], averages: Mapping[str, Tensor], D: Tensor) -> Tensor:
        """See `Curvature.multiply`: ``g (gᵀ D a) aᵀ``."""
        a, g = held["mean_a"][:, :, None], held["mean_g"][:, :, None]
        return g * (g.mT @ (D @ a)) * a.mT

    def diagonal(self, averages: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        """See `Curvature.diagonal`: ḡ² ⊗ ā²."""
        return averages["g"].square()[:, :, None] * averages["a"].square()[:, None, :]
