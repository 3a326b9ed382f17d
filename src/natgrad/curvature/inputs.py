"""K-FAC without the side of the outputs: F ≈ I ⊗ A (FOOF: Benzing 2022, "Gradient descent on neurons")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from typing_extensions import override

from natgrad.curvature.base import Curvature, Part, Spec
from natgrad.layers import Rows

if TYPE_CHECKING:
    from natgrad.curvature.kfac import KFAC


class InputKFAC(Curvature):
    """The factor A of a layer's inputs alone: ``V = W (A + γI)⁻¹``; the gradients g are not looked at."""

    diagonals = ("A",)

    def __init__(self, factors: KFAC) -> None:
        """Wrap the K-FAC whose form and side A it takes; that has no π."""
        self._factors, self.pools, self.early = factors, factors.pools, factors.early
        self.multiplies = tuple(name for name in factors.multiplies or () if name == "A")

    def __repr__(self) -> str:
        """Show the variant."""
        return self._factors.describe(A=self._factors.A)

    @property
    @override
    def factor_decay(self) -> float:
        return self._factors.factor_decay

    def statistics(self, outputs: int, inputs: int) -> tuple[Spec, ...]:
        """See `Curvature.statistics`: A, as K-FAC's."""
        return tuple(spec for spec in self._factors.statistics(outputs, inputs) if spec.name == "A")

    def parts(self, outputs: int, inputs: int) -> tuple[Part, ...]:
        """See `Curvature.parts`: that of A."""
        return tuple(part for part in self._factors.parts(outputs, inputs) if part.name == "A")

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
        if "A" in sums:
            self._factors.A.add_(sums["A"], inputs, scale=1.0, overwrite=first)

    @override
    def renew(
        self,
        part: str,
        averages: Mapping[str, Tensor],
        damping: float,
        before: Mapping[str, Tensor] | None = None,
    ) -> tuple[Sequence[Tensor], Tensor]:
        return self._factors.renew(part, averages, damping, before)

    traced = ("A",)

    def trace(self, averages: Mapping[str, Tensor], outputs: int) -> Tensor:
        """See `Curvature.trace`: that of I ⊗ A."""
        return self._factors.A.trace(averages["A"]) * outputs

    @property
    def rotated(self) -> tuple[str, ...]:  # type: ignore[override]
        """See `Curvature.rotated`: A, as K-FAC's."""
        return tuple(name for name in self._factors.rotated if name == "A")

    @override
    def misfit(self, averages: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> Sequence[tuple[Tensor, Tensor]]:
        return self._factors.misfit(averages, held)

    @override
    def solve(self, held: Mapping[str, Tensor], W: Tensor, damping: float) -> Tensor:
        A = self._factors.A
        if "vA" not in held:
            return A.multiply(W, held, "A")
        return A.rotate_back(A.rotate(W, held, "A") / (held["vA"][:, None, :] + damping), held, "A")

    @override
    def multiply(self, held: Mapping[str, Tensor], averages: Mapping[str, Tensor], D: Tensor) -> Tensor:
        A = self._factors.A
        if "vA" not in held:
            return A.times(D, averages["A"])
        return A.rotate_back(A.rotate(D, held, "A") * held["vA"][:, None, :], held, "A")

    def diagonal(self, averages: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        """See `Curvature.diagonal`: that of A, for every output."""
        return self._factors.A.diagonal(averages["A"])[:, None, :]
