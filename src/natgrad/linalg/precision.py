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
    scale, a power of two (one per block when stored, one per 512 elements when sent), so that 1e-10 and 1e+10 are in
    range.

    Attributes:
        factors: Dtype of running averages. Rounding to a narrow dtype is stochastic. None: that of the parameter, at
            least float32.
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
        """Check the dtypes."""
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
