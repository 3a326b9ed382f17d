"""Tensors of blocks, which may be stored in a narrower dtype than they are computed in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from natgrad.linalg import triangle
from natgrad.linalg.precision import at_least_float32, power_of_two
from natgrad.specs import TensorSpec

# Float16 values are scaled below 2¹⁴, so that rounding up cannot overflow.
_TOP = 14


class StateTensors(dict[str, Tensor]):
    """A tensor ``[N, *shape]`` for each spec: matrices in a dtype that may be narrow, vectors in at least float32.

    In float16 each block is stored divided by a power of two, which `read` and `write` apply.

    Attributes:
        dtype: The dtype of the matrices.
        packed: The names of the tensors that are stored as lower triangles (see `packed_shape`).
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec] = (),
        size: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        *,
        pack: bool = False,
    ) -> None:
        """Allocate N = `size` blocks of zeros; with `pack`, symmetric matrices are packed."""
        super().__init__()
        self.dtype = dtype
        self.packed = {spec.name for spec in specs if pack and spec.symmetric}
        self._specs, self._size = {spec.name: spec for spec in specs}, size
        self._scales: dict[str, Tensor] = {}
        for spec in specs:
            stored = spec_dtype(spec, dtype)
            shape = packed_shape(spec) if pack else spec.shape
            self[spec.name] = torch.zeros(size, *shape, dtype=stored, device=device)
            if stored == torch.float16:
                self._scales[spec.name] = torch.ones(size, device=device)

    def read(self, name: str, blocks: slice | Tensor) -> Tensor:
        """Return some blocks of a tensor: float16 ones in float32, others as they are stored (views, for a slice)."""
        values = self[name][blocks]
        if name not in self._scales:
            return values
        return values.float().mul_(along(self._scales[name][blocks], values.ndim - 1))

    def write(self, name: str, blocks: slice | Tensor, values: Tensor) -> None:
        """Write finite values ``[n, *shape]`` into some blocks of a tensor, packed if the tensor is in `packed`."""
        target = self[name]
        if name in self._scales and values.numel():  # there may be no rows yet
            scale = power_of_two(values.flatten(1), _TOP).float()
            self._scales[name][blocks] = scale
            values = values / along(scale, values.ndim - 1)
        target[blocks] = values.to(target.dtype)

    def whole(self, name: str, blocks: slice) -> Tensor:
        """Return some blocks of a tensor unpacked, ``[n, *shape]``."""
        values = self.read(name, blocks)
        return unpack(values, self._specs[name]) if name in self.packed else values

    def write_whole(self, name: str, blocks: slice, values: Tensor) -> None:
        """Write some blocks of a tensor from unpacked values ``[n, *shape]``."""
        self.write(name, blocks, pack(values, self._specs[name]) if name in self.packed else values)

    def to(self, dtype: torch.dtype, device: torch.device) -> StateTensors:
        """Return a copy in another dtype or on another device."""
        moved = StateTensors(list(self._specs.values()), self._size, dtype, device, pack=bool(self.packed))
        for name in self:
            moved.write(name, slice(None), self.read(name, slice(None)).to(device))
        return moved


def packed_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of a packed block of `spec`: that of a triangle for a symmetric matrix."""
    return (*spec.shape[:-2], triangle.length(spec.shape[-1])) if spec.symmetric else spec.shape


def pack(whole: Tensor, spec: TensorSpec, out: Tensor | None = None) -> Tensor:
    """Return blocks ``[n, *spec.shape]`` as ``[n, *packed_shape(spec)]``, from lower triangles of symmetric ones."""
    if not spec.symmetric:
        return whole if out is None else out.copy_(whole)
    flat = None if out is None else out.view(-1, out.shape[-1])
    return triangle.pack(whole.flatten(0, -3), flat).view(len(whole), *packed_shape(spec))


def unpack(packed: Tensor, spec: TensorSpec) -> Tensor:
    """Return the blocks ``[n, *spec.shape]`` that `pack` packed."""
    if not spec.symmetric:
        return packed
    return triangle.unpack(packed.reshape(-1, packed.shape[-1]), spec.shape[-1]).view(len(packed), *spec.shape)


def diagonals(packed: Tensor, spec: TensorSpec) -> Tensor:
    """Return the diagonals ``[n, d]`` of packed symmetric matrices, in any order, or all elements of other tensors."""
    if spec.symmetric:
        packed = triangle.diagonals(packed.reshape(-1, packed.shape[-1]), spec.shape[-1])
        return packed.view(-1, spec.numel // spec.shape[-1])
    return packed.reshape(len(packed), -1)


def spec_dtype(spec: TensorSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the tensor of `spec` is stored if matrices are stored in `dtype`."""
    return dtype if len(spec.shape) > 1 and not spec.at_least_float32 else at_least_float32(dtype)


def along(scale: Tensor, dims: int) -> Tensor:
    """Return `scale` ``[N]`` with `dims` more dimensions, to multiply tensors ``[N, ...]``."""
    return scale.view(-1, *[1] * dims)
