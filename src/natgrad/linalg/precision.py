"""The dtypes in which curvature is stored, sent and applied."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from natgrad.errors import ArgumentError, did_you_mean, require, with_suggestions

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def to_dtype(name: str, value: object, *names: str) -> torch.dtype | None:
    """Return the dtype that an argument is or names; None stays.

    Args:
        name: The argument's name.
        value: Its value.
        *names: The allowed dtypes, by default those of floating-point numbers of at least 16 bits.

    Raises:
        ValueError: if it is not.
    """
    known = {each: _DTYPES[each] for each in names or _DTYPES}
    dtype = known.get(value) if isinstance(value, str) else value
    fits = (value is None or dtype is not None) and (dtype is None or dtype in known.values())
    allowed = f"None, {' or '.join(map(str, known.values()))}, or its name"
    require(fits, name, value, allowed, did_you_mean(value, known))
    assert dtype is None or isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True, init=False)
class Precision:
    """Dtypes of factors, messages and solves.

    Sums over samples and ranks, and Cholesky and eigendecompositions, always use at least float32. Vectors
    (eigenvalues, diagonal factors, counts) are always stored and sent in at least float32. Matrices in float16 have a
    scale, a power of two: one per block when stored, so that 1e-10 and 1e+10 are in range, and one per message when
    sent. Values are rounded to the nearest.

    Dtypes are given as such or by name ("bfloat16").

    Attributes:
        factors: Dtype of running averages. None: that of the parameter, at least float32.
        wire: Dtype in which factor sums and decompositions are sent. None: that in which they are computed and stored.
        solve: Dtype of decompositions, and of products with them: bfloat16 products are summed in float32, float16
            matrices are multiplied in float32. None: that of the parameter, at least float32, or of `factors` if wider.

    Raises:
        ValueError: unless each is None, ``torch.float64``, ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``.
    """

    factors: torch.dtype | None = None
    wire: torch.dtype | None = None
    solve: torch.dtype | None = None

    @with_suggestions
    def __init__(
        self,
        *,
        factors: torch.dtype | str | None = None,
        wire: torch.dtype | str | None = None,
        solve: torch.dtype | str | None = None,
    ) -> None:
        for name, value in (("factors", factors), ("wire", wire), ("solve", solve)):
            object.__setattr__(self, name, to_dtype(name, value))

    def factor_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype of the running averages of `parameter`'s factors."""
        return self.factors or at_least_float32(parameter.dtype)

    def solve_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype in which decompositions for `parameter` are stored and multiplied."""
        return self.solve or at_least_float32(self.factor_dtype(parameter))


def resolve_precision(precision: object) -> Precision:
    """Return the precision for one dtype of all three, or its name; None is the default.

    Raises:
        ValueError: if `precision` is neither these nor a `Precision`.
    """
    if isinstance(precision, Precision):
        return precision
    try:
        dtype = to_dtype("precision", precision)
    except ArgumentError as error:
        raise ArgumentError("precision", precision, f"a natgrad.Precision, or {error.allowed}", error.near) from None
    return Precision(factors=dtype, wire=dtype, solve=dtype)


@cache
def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return `dtype`, or float32 if that is wider."""
    return torch.promote_types(dtype, torch.float32)


@cache
def least_norm(dtype: torch.dtype) -> float:
    """Return the norm below which 0 may be computed, because the squares of a vector's elements underflow."""
    return float(torch.finfo(dtype).tiny ** 0.5)


def power_of_two(groups: torch.Tensor, top: int) -> torch.Tensor:
    """Return for each row ``[..., m]`` the power of two by which its largest finite magnitude comes below 2^top.

    It is within 2^±100, and 1 for a row without nonzero finite numbers.
    """
    groups = groups.to(at_least_float32(groups.dtype))
    largest = groups.abs().nan_to_num_(0, 0, 0).amax(-1).clamp_(2.0 ** (top - 100), 2.0 ** (top + 100))
    mantissa, _ = torch.frexp(largest)
    return largest / mantissa * 2.0**-top  # exactly a power of two
