"""How one of K-FAC's two factors is stored: in full, or as its diagonal.

A side declares the factor's tensors, accumulates it, decomposes or inverts it, and multiplies gradients by the result
from the right; for the factor of the outputs the gradient is transposed. Shapes: N equal blocks, d the size of the
factor, r that of the other one; a gradient is ``W [N, r, d]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from natgrad import linalg
from natgrad.layers import Rows
from natgrad.linalg.iterative import Warm
from natgrad.specs import Statistic, Tensors, TensorSpec

# Whether a factor is decomposed into eigenvectors and eigenvalues, or inverted with damping.
Form = Literal["eigen", "inverse"]


@dataclass(frozen=True)
class Side:
    """The storage of a factor ``[d, d]``.

    Attributes:
        full: Whether the whole factor is stored, or only its diagonal ``[d]``, which has no eigenvectors.
    """

    full: bool = True

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
            symmetric=self.full,
            nonnegative=not self.full,
            source=source,
            per=per,
            gradient_power=gradient_power,
        )

    def cost(self, size: int) -> float:
        """Return the multiply-adds of a decomposition, up to a factor common to both kinds of storage."""
        return float(size) ** 3 if self.full else float(size)

    def writes(self, form: Form | Literal["root"], name: str, size: int) -> tuple[TensorSpec, ...]:
        """Return the tensors that `decompose` (form "eigen") or `invert` computes, or an inverse root."""
        if form != "eigen":
            return (TensorSpec(f"{form}_{name}", self._shape(size), symmetric=self.full),)
        values = TensorSpec(f"v{name}", (size,))
        return (TensorSpec(f"Q{name}", (size, size)), values) if self.full else (values,)

    def _shape(self, size: int) -> tuple[int, ...]:
        return (size, size) if self.full else (size,)

    def add_(self, out: Tensor, rows: Rows, *, scale: float) -> None:
        """Add the stored part of `scale` Σ x xᵀ of all `rows` to `out`."""
        if self.full:
            rows.add_gram_(out, scale=scale)
        else:
            out.add_(rows.squares().mul_(scale))

    def diagonal(self, factor: Tensor) -> Tensor:
        """Return the diagonal ``[N, d]``, a view; `factor` may be a diagonal already."""
        return factor if factor.ndim == 2 else factor.diagonal(dim1=-2, dim2=-1)

    def trace(self, factor: Tensor) -> Tensor:
        """Return the trace ``[N]``."""
        return self.diagonal(factor).sum(-1)

    def decompose(
        self, name: str, factor: Tensor, warm: Warm | None = None, previous: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return eigenvectors (if the side has any) and eigenvalues, and whether each block succeeded ``[N]``.

        With `warm` the decomposition starts from the eigenvectors `previous`, if there are any.
        """
        if not self.full:
            return {f"v{name}": factor}, factor.sum(-1).isfinite()
        values, vectors, fine = linalg.eigh(factor) if warm is None else warm.eigh(factor, previous)
        return {f"Q{name}": vectors, f"v{name}": values}, fine

    def invert(self, name: str, factor: Tensor, damping: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return ``(factor + damping I)⁻¹`` for a damping ``[N]``, and whether each block succeeded ``[N]``."""
        if self.full:
            inverse, fine = linalg.damped_inverse(factor, damping)
        else:
            inverse = (factor + damping[:, None]).reciprocal_()
            fine = inverse.sum(-1).isfinite()
        return {f"inverse_{name}": inverse}, fine

    def rotate(self, W: Tensor, computed: Tensors, name: str) -> Tensor:
        """Return W in the eigenbasis."""
        return linalg.product(W, computed[f"Q{name}"]) if self.full else W

    def rotate_back(self, W: Tensor, computed: Tensors, name: str) -> Tensor:
        """Undo `rotate`."""
        return linalg.product(W, computed[f"Q{name}"].mT) if self.full else W

    def multiply(self, W: Tensor, computed: Tensors, name: str) -> Tensor:
        """Return W times the inverse."""
        inverse = computed[f"inverse_{name}"]
        return linalg.product(W, inverse) if self.full else W * inverse[:, None, :]
