"""The dtypes in which curvature is stored, sent and applied."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from natgrad.errors import require

_ALLOWED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of factors, messages and solves.

    Sums over samples and ranks, and Cholesky and eigendecompositions, always use at least float32. Vectors
    (eigenvalues, diagonal factors, counts) are always stored and sent in at least float32. Matrices in float16 have a
    scale, a power of two: one per block when stored, so that 1e-10 and 1e+10 are in range, and one per message when
    sent. Values are rounded to the nearest.

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

    def __post_init__(self) -> None:
        for name in ("factors", "wire", "solve"):
            value = getattr(self, name)
            require(value is None or value in _ALLOWED, name, value, f"None or {' or '.join(map(str, _ALLOWED))}")

    def factor_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype of the running averages of `parameter`'s factors."""
        return self.factors or at_least_float32(parameter.dtype)

    def solve_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype in which decompositions for `parameter` are stored and multiplied."""
        return self.solve or at_least_float32(self.factor_dtype(parameter))


@cache
def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return `dtype`, or float32 if that is wider."""
    return torch.promote_types(dtype, torch.float32)


def power_of_two(groups: torch.Tensor, top: int) -> torch.Tensor:
    """Return for each row ``[..., m]`` the power of two by which its largest finite magnitude comes below 2^top.

    It is within 2^±100, and 1 for a row without nonzero finite numbers.
    """
    groups = groups.to(at_least_float32(groups.dtype))
    largest = groups.abs().nan_to_num_(0, 0, 0).amax(-1).clamp_(2.0 ** (top - 100), 2.0 ** (top + 100))
    mantissa, _ = torch.frexp(largest)
    return largest / mantissa * 2.0**-top  # exactly a power of two
