"""How one of K-FAC's two factors is stored: in full, or as its diagonal.

A side declares the factor's tensors, accumulates it, decomposes or inverts it, and multiplies gradients by the result
from the right; for the factor of the outputs the gradient is transposed. Shapes: N equal blocks, d the size of the
factor, r that of the other one; a gradient is ``W [N, r, d]``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from typing_extensions import override

from natgrad import linalg
from natgrad.layers import Rows
from natgrad.linalg.iterative import Warm
from natgrad.specs import Statistic, TensorSpec

# Whether a factor is decomposed into eigenvectors and eigenvalues, or inverted with damping.
Form = Literal["eigen", "inverse"]


class Side(ABC):
    """The storage of a factor ``[d, d]``."""

    @abstractmethod
    def __str__(self) -> str:
        """Return a description; empty for a full factor."""

    @abstractmethod
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

    @abstractmethod
    def cost(self, size: int) -> float:
        """Return the multiply-adds of a decomposition, up to a factor common to all sides."""

    @abstractmethod
    def writes(self, form: Form, name: str, size: int) -> tuple[TensorSpec, ...]:
        """Return the tensors that `decompose` (form "eigen") or `invert` computes."""

    @abstractmethod
    def add_(self, out: Tensor, rows: Rows, *, scale: float) -> None:
        """Add the stored part of `scale` Σ x xᵀ of all `rows` to `out`."""

    @abstractmethod
    def add_diagonal_(self, factor: Tensor, diagonal: Tensor) -> None:
        """Add a ``diagonal [N, d]`` to a factor."""

    @abstractmethod
    def diagonal(self, factor: Tensor) -> Tensor:
        """Return the diagonal ``[N, d]``."""

    @abstractmethod
    def trace(self, factor: Tensor) -> Tensor:
        """Return the trace ``[N]``."""

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

    def off_diagonal(self, factor: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``‖offdiag(Qᵀ X Q)‖²`` and ``‖X‖²`` ``[N]`` for eigenvectors Q, if the side has any."""
        raise NotImplementedError

    @property
    def matrices(self) -> bool:
        """Whether the computed tensors are matrices, from which the next decomposition can start."""
        return True

    @abstractmethod
    def invert(
        self,
        name: str,
        factor: Tensor,
        damping: Tensor,
        warm: Warm | None = None,
        previous: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return ``(factor + damping I)⁻¹`` for a damping ``[N]``, and whether each block succeeded ``[N]``.

        With `warm` the iteration starts from the inverse `previous`, if there is one.
        """

    @abstractmethod
    def rotate(self, W: Tensor, computed: Mapping[str, Tensor], name: str) -> Tensor:
        """Return W in the eigenbasis, ``[N, r, d]``."""

    @abstractmethod
    def rotate_back(self, W: Tensor, computed: Mapping[str, Tensor], name: str) -> Tensor:
        """Undo `rotate`."""

    @abstractmethod
    def multiply(self, W: Tensor, computed: Mapping[str, Tensor], name: str) -> Tensor:
        """Return W times the inverse."""


@dataclass(frozen=True)
class Full(Side):
    """The whole factor ``[d, d]``."""

    @override
    def __str__(self) -> str:
        return ""

    @override
    def statistic(
        self,
        name: str,
        size: int,
        *,
        source: Literal["inputs", "gradients", "both"],
        per: Literal["sample", "position"],
        gradient_power: Literal[0, 2],
    ) -> Statistic:
        return Statistic(name, (size, size), symmetric=True, source=source, per=per, gradient_power=gradient_power)

    @override
    def cost(self, size: int) -> float:
        return float(size) ** 3

    @override
    def writes(self, form: Form, name: str, size: int) -> tuple[TensorSpec, ...]:
        if form == "eigen":
            return (TensorSpec(f"Q{name}", (size, size)), TensorSpec(f"v{name}", (size,)))
        return (TensorSpec(f"inverse_{name}", (size, size), symmetric=True),)

    @override
    def add_(self, out: Tensor, rows: Rows, *, scale: float) -> None:
        rows.add_gram_(out, scale=scale)

    @override
    def add_diagonal_(self, factor: Tensor, diagonal: Tensor) -> None:
        factor.diagonal(dim1=-2, dim2=-1).add_(diagonal)

    @override
    def diagonal(self, factor: Tensor) -> Tensor:
        return factor.diagonal(dim1=-2, dim2=-1)

    @override
    def trace(self, factor: Tensor) -> Tensor:
        return factor.diagonal(dim1=-2, dim2=-1).sum(-1)

    @override
    def decompose(
        self, name: str, factor: Tensor, warm: Warm | None = None, previous: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        values, vectors, fine = linalg.eigh(factor) if warm is None else warm.eigh(factor, previous)
        return {f"Q{name}": vectors, f"v{name}": values}, fine

    @override
    def off_diagonal(self, factor: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return linalg.off_diagonal(factor, vectors)

    @override
    def invert(
        self,
        name: str,
        factor: Tensor,
        damping: Tensor,
        warm: Warm | None = None,
        previous: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        if warm is None:
            inverse, fine = linalg.damped_inverse(factor, damping)
        else:
            inverse, fine = warm.damped_inverse(factor, damping, previous)
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

    @override
    def __str__(self) -> str:
        return "diagonal"

    @property
    @override
    def matrices(self) -> bool:
        return False

    @override
    def statistic(
        self,
        name: str,
        size: int,
        *,
        source: Literal["inputs", "gradients", "both"],
        per: Literal["sample", "position"],
        gradient_power: Literal[0, 2],
    ) -> Statistic:
        return Statistic(name, (size,), source=source, per=per, gradient_power=gradient_power, nonnegative=True)

    @override
    def cost(self, size: int) -> float:
        return float(size)

    @override
    def writes(self, form: Form, name: str, size: int) -> tuple[TensorSpec, ...]:
        return (TensorSpec(f"v{name}" if form == "eigen" else f"inverse_{name}", (size,)),)

    @override
    def add_(self, out: Tensor, rows: Rows, *, scale: float) -> None:
        out.add_(rows.squares().mul_(scale))

    @override
    def add_diagonal_(self, factor: Tensor, diagonal: Tensor) -> None:
        factor.add_(diagonal)

    @override
    def diagonal(self, factor: Tensor) -> Tensor:
        return factor

    @override
    def trace(self, factor: Tensor) -> Tensor:
        return factor.sum(-1)

    @override
    def decompose(
        self, name: str, factor: Tensor, warm: Warm | None = None, previous: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        return {f"v{name}": factor}, factor.sum(-1).isfinite()

    @override
    def invert(
        self,
        name: str,
        factor: Tensor,
        damping: Tensor,
        warm: Warm | None = None,
        previous: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
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
