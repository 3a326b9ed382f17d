"""K-FAC with the factor of the inputs alone: F ≈ I ⊗ A (FOOF: Benzing 2022, "Gradient descent on neurons")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from typing_extensions import override

from natgrad.curvature.base import Curvature
from natgrad.layers import Rows
from natgrad.specs import Statistic, Task

if TYPE_CHECKING:
    from natgrad.curvature.kfac import KFAC


class InputKFAC(Curvature):
    """The factor A of a layer's inputs alone: ``V = W (A + γI)⁻¹``."""

    takes_narrow = True
    diagonal_reads = ("A",)

    def __init__(self, factors: KFAC) -> None:
        """Wrap the K-FAC whose form and factor A it uses; `factors` must have no π."""
        self._factors, self.sum_positions, self.factor_decay = factors, factors.sum_positions, factors.factor_decay

    def __repr__(self) -> str:
        """Show the variant."""
        return self._factors.describe(A=self._factors.A)

    def statistics(self, d_out: int, d_in: int) -> tuple[Statistic, ...]:
        """Return A."""
        return tuple(spec for spec in self._factors.statistics(d_out, d_in) if spec.name == "A")

    def tasks(self, d_out: int, d_in: int) -> tuple[Task, ...]:
        """Return the task of A."""
        return tuple(task for task in self._factors.tasks(d_out, d_in) if task.name == "A")

    @override
    def accumulate(
        self,
        sums: Mapping[str, Tensor],
        inputs: Rows,
        gradients: Rows,
        scale: float,
        computed: Mapping[str, Tensor] | None = None,
    ) -> None:
        if "A" in sums:
            self._factors.A.add_(sums["A"], inputs, scale=1.0)

    @override
    def compute(
        self,
        task: str,
        averages: Mapping[str, Tensor],
        damping: float,
        previous: Mapping[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        return self._factors.compute(task, averages, damping, previous)

    trace_reads = ("A",)

    def trace(self, averages: Mapping[str, Tensor], d_out: int) -> Tensor:
        """Return the trace of I ⊗ A."""
        return self._factors.A.trace(averages["A"]) * d_out

    @property
    def off_diagonal_reads(self) -> tuple[str, ...] | None:  # type: ignore[override]
        """A in the eigen forms."""
        return tuple(name for name in self._factors.off_diagonal_reads or () if name == "A") or None

    @override
    def off_diagonal(
        self, averages: Mapping[str, Tensor], computed: Mapping[str, Tensor]
    ) -> Sequence[tuple[Tensor, Tensor]]:
        return self._factors.off_diagonal(averages, computed)

    @override
    def precondition(
        self,
        computed: Mapping[str, Tensor],
        averages: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        gradient: Tensor,
        damping: float,
    ) -> Tensor:
        A = self._factors.A
        if "vA" not in computed:
            return A.multiply(gradient, computed, "A")
        return A.rotate_back(A.rotate(gradient, computed, "A") / (computed["vA"][:, None, :] + damping), computed, "A")

    def diagonal(self, averages: Mapping[str, Tensor], d_out: int, d_in: int) -> Tensor:
        """Return the diagonal of A, for every output."""
        return self._factors.A.diagonal(averages["A"])[:, None, :]
