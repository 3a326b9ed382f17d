"""Which dtypes curvature is kept, sent and applied in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from natgrad.errors import require

_ALLOWED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of factors, messages and solves.

    Whatever is chosen, sums over samples and ranks accumulate, and Cholesky and eigendecompositions run, in at least
    float32; and vectors (eigenvalues, diagonal factors, counts), whose range is wide and whose size is small, are kept
    and sent in at least float32. Matrices in float16 carry powers of two (one a block where kept, one for 512 elements
    where sent), so that neither 1e-10 nor 1e+10 leaves its range.

    Attributes:
        factors: Dtype in which running averages are kept. Rounding to a narrow one is stochastic, for to the nearest
            would lose most of what a new batch adds. None: the parameter's, at least float32.
        wire: Dtype in which factor sums and renewed curvature travel. None: that in which they are summed and held.
        solve: Dtype in which renewed curvature is held, and of the products with it: those in bfloat16 are summed in
            float32, what is held in float16 is multiplied in float32. None: the parameter's, at least float32, or that
            of `factors` if wider.

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
        """Return the dtype in which running averages of `parameter`'s factors are kept."""
        return self.factors or at_least_float32(parameter.dtype)

    def solve_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype in which renewed curvature of `parameter` is held and multiplied."""
        return self.solve or at_least_float32(self.factor_dtype(parameter))


@cache
def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return `dtype`, or float32 if that is wider."""
    return torch.promote_types(dtype, torch.float32)
