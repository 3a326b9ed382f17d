"""Curvature of rank one: F ≈ ḡḡᵀ ⊗ āāᵀ (Eva: Zhang, Shi & Li 2023)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from natgrad import linalg
from natgrad.curvature.base import Curvature, check_estimate
from natgrad.errors import require_one_of, with_suggestions
from natgrad.layers import Rows
from natgrad.printed import changed
from natgrad.specs import Statistic, Task, Tensors, TensorSpec


class RankOne(Curvature):
    """K-FAC with factors of rank one: ḡḡᵀ and āāᵀ, with running averages ā and ḡ of the means of the rows a and g.

    ``(ḡḡᵀ ⊗ āāᵀ + γI)⁻¹`` has a closed form (Sherman & Morrison 1950): nothing is decomposed, and statistics, memory
    and messages are two vectors per layer. It uses the damping of the step. A refresh costs nothing: use
    ``Refresh(factors=1, inverses=1)``.

    The default damping is 0.1, because the part of a gradient orthogonal to the layer's vector is multiplied by 1/γ.

    ḡ is the mean gradient of the loss for the true labels. There is no sampled variant: the expected mean gradient for
    sampled labels is zero. Norm layers use `UnitWise`.
    """

    default_damping = 0.1
    takes_narrow = takes_narrow_rows = True

    @with_suggestions
    def __init__(self, *, sharing: Literal["expand", "reduce"] = "expand", factor_decay: float = 0.95) -> None:
        """Choose the variant.

        Args:
            sharing: How positions of a shared weight combine. "expand": ā and ḡ are means over all positions of all
                samples (Zhang 2023). "reduce": over samples, of which a is averaged and g summed over positions
                (Eschenhagen 2023).
            factor_decay: The weight of the old value in the running averages, in [0, 1).

        Raises:
            ValueError: if an argument is not allowed.
        """
        require_one_of("sharing", sharing, "expand", "reduce")
        self.sharing, self.sum_positions = sharing, sharing == "reduce"
        self.factor_decay, self.likelihood = check_estimate("empirical", factor_decay, None)

    def __repr__(self) -> str:
        return f"RankOne({', '.join([f'sharing={self.sharing!r}', *changed(self, RankOne, 'factor_decay')])})"

    def statistics(self, d_out: int, d_in: int) -> tuple[Statistic, ...]:
        """Return ā and ḡ, means over samples and positions. Both are due together, because one task reads both."""
        return (
            Statistic("a", (d_in,), source="both", per="position"),
            Statistic("g", (d_out,), source="both", per="position", gradient_power=1),
        )

    def tasks(self, d_out: int, d_in: int) -> tuple[Task, ...]:
        """Return the task that copies the means."""
        written = (TensorSpec("mean_a", (d_in,)), TensorSpec("mean_g", (d_out,)))
        return (Task("ag", ("a", "g"), written, float(d_out + d_in)),)

    @override
    def accumulate(
        self, sums: Tensors, inputs: Rows, gradients: Rows, scale: float, computed: Tensors | None = None
    ) -> None:
        for name, rows, factor in (("a", inputs, 1.0), ("g", gradients, scale)):
            sums[name].add_(rows.pool().sum(1).to(sums[name].dtype).mul_(factor))

    @override
    def compute(
        self, task: str, averages: Tensors, damping: float, previous: Tensors | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        a, g = averages["a"], averages["g"]
        return {"mean_a": a, "mean_g": g}, torch.ones(len(a), dtype=torch.bool, device=a.device)

    trace_reads = ("a", "g")

    def trace(self, averages: Tensors, d_out: int) -> Tensor:
        """Return ``‖ā‖² ‖ḡ‖²``."""
        return averages["a"].square().sum(-1) * averages["g"].square().sum(-1)

    @override
    def precondition(
        self, computed: Tensors, averages: Tensors, state: Tensors, gradient: Tensor, damping: float
    ) -> Tensor:
        return linalg.solve_rank_one(gradient, computed["mean_a"], computed["mean_g"], damping)
