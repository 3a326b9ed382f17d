"""How one of K-FAC's two factors is stored: in full, or as its diagonal.

A side declares the factor's tensors, accumulates it, decomposes or inverts it, and multiplies gradients by the result
from the right; for the factor of the outputs the gradient is transposed. Shapes: N equal blocks, d the size of the
factor, r that of the other one; a gradient is ``W [N, r, d]``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from typing_extensions import override

from natgrad import linalg
from natgrad.layers import Rows
from natgrad.linalg.iterative import Warm
from natgrad.specs import Statistic, TensorSpec

# Whether a factor is decomposed into eigenvectors and eigenvalues, or inverted with damping.
Form = Literal["eigen", "inverse"]


class Side(ABC):
    """The storage of a factor ``[d, d]``.

    Attributes:
        matrices: Whether the computed tensors are matrices, from which the next decomposition can start.
    """

    matrices: ClassVar[bool]

    @abstractmethod
    def __str__(self) -> str:
        """Return a description; empty for a full factor."""

    def statistic(
        self,
        name: str,
        size: int,
        *,
        source: Literal["inputs", "gradients", "both"],
        per: Literal["sample", "position"],
        gradient_power: Literal[0, 2],
    ) -> Statistic:
        """Return the statistic that sums the stored part of x xᵀ."""
        return Statistic(
            name,
            self._shape(size),
            symmetric=self.matrices,
            nonnegative=not self.matrices,
            source=source,
            per=per,
            gradient_power=gradient_power,
        )

    def cost(self, size: int) -> float:
        """Return the multiply-adds of a decomposition, up to a factor common to all sides."""
        return float(size) ** 3 if self.matrices else float(size)

    def writes(self, form: Form, name: str, size: int) -> tuple[TensorSpec, ...]:
        """Return the tensors that `decompose` (form "eigen") or `invert` computes."""
        if form == "inverse":
            return (TensorSpec(f"inverse_{name}", self._shape(size), symmetric=self.matrices),)
        values = TensorSpec(f"v{name}", (size,))
        return (TensorSpec(f"Q{name}", (size, size)), values) if self.matrices else (values,)

    def _shape(self, size: int) -> tuple[int, ...]:
        return (size, size) if self.matrices else (size,)

    @abstractmethod
    def add_(self, out: Tensor, rows: Rows, *, scale: float) -> None:
        """Add the stored part of `scale` Σ x xᵀ of all `rows` to `out`."""

    @abstractmethod
    def diagonal(self, factor: Tensor) -> Tensor:
        """Return the diagonal ``[N, d]``, a view."""

    def trace(self, factor: Tensor) -> Tensor:
        """Return the trace ``[N]``."""
        return self.diagonal(factor).sum(-1)

    def mean_eigenvalue(self, factor: Tensor) -> Tensor:
        """Return the trace divided by d ``[N]``; `factor` may be its diagonal ``[N, d]``."""
        diagonal = factor if factor.ndim == 2 else self.diagonal(factor)
        return diagonal.sum(-1) / factor.shape[-1]

    @abstractmethod
    def decompose(
        self, name: str, factor: Tensor, warm: Warm | None = None, previous: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return eigenvectors (if the side has any) and eigenvalues, and whether each block succeeded ``[N]``.

        With `warm` the decomposition starts from the eigenvectors `previous`, if there are any.
        """

    @abstractmethod
    def invert(self, name: str, factor: Tensor, damping: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return ``(factor + damping I)⁻¹`` for a damping ``[N]``, and whether each block succeeded ``[N]``."""

    @abstractmethod
    def rotate(self, W: Tensor, computed: Mapping[str, Tensor], name: str) -> Tensor:
        """Return W in the eigenbasis."""

    @abstractmethod
    def rotate_back(self, W: Tensor, computed: Mapping[str, Tensor], name: str) -> Tensor:
        """Undo `rotate`."""

    @abstractmethod
    def multiply(self, W: Tensor, computed: Mapping[str, Tensor], name: str) -> Tensor:
        """Return W times the inverse."""


@dataclass(frozen=True)
class Full(Side):
    """The whole factor ``[d, d]``."""

    matrices = True

    @override
    def __str__(self) -> str:
        return ""

    @override
    def add_(self, out: Tensor, rows: Rows, *, scale: float) -> None:
        rows.add_gram_(out, scale=scale)

    @override
    def diagonal(self, factor: Tensor) -> Tensor:
        return factor.diagonal(dim1=-2, dim2=-1)

    @override
    def decompose(
        self, name: str, factor: Tensor, warm: Warm | None = None, previous: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        values, vectors, fine = linalg.eigh(factor) if warm is None else warm.eigh(factor, previous)
        return {f"Q{name}": vectors, f"v{name}": values}, fine

    @override
    def invert(self, name: str, factor: Tensor, damping: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        inverse, fine = linalg.damped_inverse(factor, damping)
        return {f"inverse_{name}": inverse}, fine

    @override
    def rotate(self, W: Tensor, computed: Mapping[str, Tensor], name: str) -> Tensor:
        return linalg.product(W, computed[f"Q{name}"])

    @override
    def rotate_back(self, W: Tensor, computed: Mapping[str, Tensor], name: str) -> Tensor:
        return linalg.product(W, computed[f"Q{name}"].mT)

    @override
    def multiply(self, W: Tensor, computed: Mapping[str, Tensor], name: str) -> Tensor:
        return linalg.product(W, computed[f"inverse_{name}"])


@dataclass(frozen=True)
class Diagonal(Side):
    """The factor's diagonal ``[d]``, without eigenvectors."""

    matrices = False

    @override
    def __str__(self) -> str:
        return "diagonal"

    @override
    def add_(self, out: Tensor, rows: Rows, *, scale: float) -> None:
        out.add_(rows.squares().mul_(scale))

    @override
    def diagonal(self, factor: Tensor) -> Tensor:
        return factor

    @override
    def decompose(
        self, name: str, factor: Tensor, warm: Warm | None = None, previous: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        return {f"v{name}": factor}, factor.sum(-1).isfinite()

    @override
    def invert(self, name: str, factor: Tensor, damping: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        inverse = (factor + damping[:, None]).reciprocal_()
        return {f"inverse_{name}": inverse}, inverse.sum(-1).isfinite()

    @override
    def rotate(self, W: Tensor, computed: Mapping[str, Tensor], name: str) -> Tensor:
        return W

    @override
    def rotate_back(self, W: Tensor, computed: Mapping[str, Tensor], name: str) -> Tensor:
        return W

    @override
    def multiply(self, W: Tensor, computed: Mapping[str, Tensor], name: str) -> Tensor:
        return W * computed[f"inverse_{name}"][:, None, :]
