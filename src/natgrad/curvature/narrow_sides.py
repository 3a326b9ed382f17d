"""Reduced forms of a large factor: its diagonal, or square blocks along it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Literal

from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from natgrad import linalg
from natgrad.curvature.sides import Form, Side
from natgrad.layers import Rows
from natgrad.linalg.iterative import Warm
from natgrad.specs import Statistic, TensorSpec


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


@dataclass(frozen=True)
class Blocks(Side):
    """Square blocks along the diagonal ``[k, l, l]``: THOR's split (Chen 2021); the last is padded with zeros.

    Attributes:
        size: d.
        count: k.
    """

    size: int
    count: int

    @property
    def length(self) -> int:
        """The number of columns of a block."""
        return ceil(self.size / self.count)

    @override
    def __str__(self) -> str:
        return f"in {self.count} blocks of {self.length}"

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
        shape = (self.count, self.length, self.length)
        return Statistic(name, shape, symmetric=True, source=source, per=per, gradient_power=gradient_power)

    @override
    def cost(self, size: int) -> float:
        return self.count * float(self.length) ** 3

    @override
    def writes(self, form: Form, name: str, size: int) -> tuple[TensorSpec, ...]:
        shape = (self.count, self.length, self.length)
        if form == "eigen":
            return (TensorSpec(f"Q{name}", shape), TensorSpec(f"v{name}", (self.eigenvalues(size),)))
        return (TensorSpec(f"inverse_{name}", shape, symmetric=True),)

    def eigenvalues(self, size: int) -> int:
        """Return the number of eigenvalues, including those of the padding of the last block."""
        return self.count * self.length

    @override
    def add_(self, out: Tensor, rows: Rows, *, scale: float) -> None:
        for index, start in enumerate(range(0, self.size, self.length)):
            stop = min(start + self.length, self.size)
            width = stop - start
            rows.narrow(start, stop).add_gram_(out[:, index, :width, :width], scale=scale)

    @override
    def add_diagonal_(self, factor: Tensor, diagonal: Tensor) -> None:
        factor.diagonal(dim1=-2, dim2=-1).add_(self._padded(diagonal).unflatten(-1, (self.count, -1)))

    @override
    def diagonal(self, factor: Tensor) -> Tensor:
        return factor.diagonal(dim1=-2, dim2=-1).flatten(1)[:, : self.size]

    @override
    def trace(self, factor: Tensor) -> Tensor:
        return factor.diagonal(dim1=-2, dim2=-1).sum((-2, -1))

    def mean_eigenvalue(self, factor: Tensor) -> Tensor:
        """Return the mean eigenvalue, without the padding of the last block."""
        return (factor if factor.ndim == 2 else self.diagonal(factor)).sum(-1) / self.size

    @override
    def decompose(
        self, name: str, factor: Tensor, warm: Warm | None = None, previous: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        every, start = factor.flatten(0, 1), None if previous is None else previous.flatten(0, 1)
        values, vectors, fine = linalg.eigh(every) if warm is None else warm.eigh(every, start)
        computed = {f"Q{name}": vectors.view_as(factor), f"v{name}": values.view(len(factor), -1)}
        return computed, fine.view(len(factor), -1).all(-1)

    def off_diagonal(self, factor: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norms within the blocks."""
        off, whole = linalg.off_diagonal(factor.flatten(0, 1), vectors.flatten(0, 1))
        return off.view(len(factor), -1).sum(-1), whole.view(len(factor), -1).sum(-1)

    @override
    def invert(
        self,
        name: str,
        factor: Tensor,
        damping: Tensor,
        warm: Warm | None = None,
        previous: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        every, damping = factor.flatten(0, 1), damping.repeat_interleave(self.count)
        if warm is None:
            inverse, fine = linalg.damped_inverse(every, damping)
        else:
            inverse, fine = warm.damped_inverse(every, damping, None if previous is None else previous.flatten(0, 1))
        return {f"inverse_{name}": inverse.view_as(factor)}, fine.view(len(factor), -1).all(-1)

    @override
    def rotate(self, W: Tensor, computed: Mapping[str, Tensor], name: str) -> Tensor:
        return self._times(W, computed[f"Q{name}"])

    @override
    def rotate_back(self, W: Tensor, computed: Mapping[str, Tensor], name: str) -> Tensor:
        return self._times(W, computed[f"Q{name}"].mT)[..., : self.size]

    @override
    def multiply(self, W: Tensor, computed: Mapping[str, Tensor], name: str) -> Tensor:
        return self._times(W, computed[f"inverse_{name}"])[..., : self.size]

    def _times(self, W: Tensor, blocks: Tensor) -> Tensor:
        """Return ``W [N, r, d]`` times the block-diagonal matrix of ``blocks [N, k, l, l]``: ``[N, r, k l]``."""
        split = self._padded(W).unflatten(-1, (self.count, -1)).transpose(1, 2)  # [N, k, r, l]
        return linalg.product(split, blocks).transpose(1, 2).flatten(2)

    def _padded(self, tensor: Tensor) -> Tensor:
        missing = self.count * self.length - tensor.shape[-1]
        return F.pad(tensor, (0, missing)) if missing else tensor
