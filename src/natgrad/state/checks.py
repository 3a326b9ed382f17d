"""Checks of the tensors in a state before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from natgrad.errors import require
from natgrad.linalg.precision import at_least_float32
from natgrad.specs import TensorSpec
from natgrad.state.block_group import BlockGroup

# The entries of a layer that hold flags and counts, and those that hold bias corrections.
WHOLE = {"renewed": torch.bool, "ladder": torch.int32}
_WEIGHTS = ("weight", "early weight")

# The relative error of an element that rounding to bfloat16 in many steps leaves, and that of elements without one.
_ROUNDED, _EXACT = 2**-4, 1e-5
# The bytes of the blocks that are checked together, which bounds the memory of intermediate results.
_PIECE = 2**24


def check_tensors(loaded: Mapping[str, Mapping[str, Any]], groups: list[BlockGroup]) -> None:
    """Check the tensors that a state has for the layers of some groups, also those that only other ranks need.

    So all ranks reject the same state, without communication. Every tensor must have a fitting dtype and shape. Running
    averages, their bias corrections and the curvature's state must be finite; not the results of tasks, as the guard
    replaces those that are unusable. Of running averages, symmetric matrices must be positive semi-definite
    (`_are_semidefinite`), and the elements of `TensorSpec.nonnegative` ones at least 0. Bias corrections
    must be in [0, 1].

    Cost: a Cholesky decomposition of each factor, on the model's device.

    Raises:
        ValueError: if a tensor is not allowed, naming the layer and the tensor.
    """
    for group in groups:
        averages = {spec.name for spec in group.statistics}
        for member in group.members:
            tensors, count = loaded.get(member.layer.key, {}), member.stop - member.start
            results = {spec.name: spec for spec in group.written(group.rows_of(tensors))}
            specs = results | {spec.name: spec for spec in (*group.statistics, *group.memory_specs)}
            specs |= {name: TensorSpec(name, (), nonnegative=True) for name in _WEIGHTS}
            for name, tensor in tensors.items():
                place = f"state['blocks'][{member.layer.key!r}][{name!r}]"
                if name in specs:
                    _check_kind(place, tensor, (count, *specs[name].shape), whole=False)
                    if name not in results:
                        factor = name in averages or name in _WEIGHTS
                        _check_elements(place, tensor, specs[name], group.device, factor=factor)
                    fits = name not in _WEIGHTS or bool((tensor <= 1 + _EXACT).all())
                    require(fits, place, tensor, "at most 1")
                elif name in WHOLE:
                    _check_kind(place, tensor, None, whole=True)


def _check_kind(place: str, tensor: Any, shape: tuple[int, ...] | None, *, whole: bool) -> None:
    """Check that a value is a tensor of this shape, of whole numbers (or bools) or of floating-point numbers."""
    kind = "whole numbers or bools" if whole else "floating-point numbers"
    found = f"{tensor.dtype}{list(tensor.shape)}, {tensor.layout}" if isinstance(tensor, Tensor) else tensor
    fits = isinstance(tensor, Tensor) and tensor.layout == torch.strided and shape in (None, tensor.shape)
    fits = fits and not tensor.is_complex() and tensor.is_floating_point() != whole
    sizes = "" if shape is None else f" {list(shape)}"
    require(fits and (whole or tensor.dtype.itemsize > 1), place, found, f"a tensor{sizes} of {kind}")


def _check_elements(place: str, tensor: Tensor, spec: TensorSpec, device: torch.device, *, factor: bool) -> None:
    """Check the elements of blocks ``[n, *spec.shape]``; whether more than finite only for a `factor`."""
    step = max(1, _PIECE // max(1, tensor[:1].nbytes))
    for start in range(0, len(tensor), step):
        blocks = tensor[start : start + step].detach().to(device)
        blocks = blocks.to(at_least_float32(blocks.dtype))
        unfit = int((~blocks.isfinite()).sum())
        require(not unfit, place, f"a tensor with {unfit} elements that are nan or infinite", "finite")
        if factor and spec.nonnegative and blocks.numel():
            least, most = float(blocks.min()), float(blocks.max())
            require(least >= -_EXACT * abs(most), place, f"a tensor with the element {least:.3g}", "nonnegative")
        if factor and spec.symmetric:
            matrices = blocks.flatten(0, -3)
            size = matrices.abs().amax((-2, -1))
            error = float(((matrices - matrices.mT).abs().amax((-2, -1)) - _EXACT * size).amax())
            require(error <= 0, place, f"a matrix that differs from its transpose by {error:.3g}", "symmetric")
            unsound = (~_are_semidefinite(matrices / torch.where(size > 0, size, 1)[:, None, None])).nonzero().flatten()
            if len(unsound):
                values = torch.linalg.eigvalsh(matrices[unsound[0]].double())
                found = f"a matrix with eigenvalues from {float(values[0]):.3g} to {float(values[-1]):.3g}"
                require(False, place, found, "positive semi-definite")


def _are_semidefinite(matrices: Tensor) -> Tensor:
    """Return which symmetric matrices ``[N, d, d]`` are positive semi-definite but for rounding ``[N]`` (bool).

    Their smallest eigenvalue must be at least ``-ε min(‖X‖_F, ‖X‖_∞)``, a bound on what relative errors ε of the
    elements can change it by: then the Cholesky decomposition of X with this much added to its diagonal succeeds.
    """
    bound = torch.minimum(torch.linalg.matrix_norm(matrices), torch.linalg.matrix_norm(matrices, ord=torch.inf))
    shifted = matrices.clone()
    shifted.diagonal(dim1=-2, dim2=-1).add_(torch.where(bound > 0, _ROUNDED * bound, 1)[:, None])
    info: Tensor = torch.linalg.cholesky_ex(shifted).info
    return info == 0
