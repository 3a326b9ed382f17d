"""Which dtype the factors are kept and the decompositions computed in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from natgrad.errors import require


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of factors and solves.

    Attributes:
        factors: Dtype in which products are summed and running averages kept. None: the parameter's, at least float32.
        solve: Dtype of decompositions and of the gradients while they are preconditioned. None: that of the factors.

    Raises:
        ValueError: unless each is None, ``torch.float32`` or ``torch.float64``.
    """

    factors: torch.dtype | None = None
    solve: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Check both dtypes."""
        for name in ("factors", "solve"):
            value = getattr(self, name)
            require(value in (None, torch.float32, torch.float64), name, value, "None, torch.float32 or torch.float64")

    def factor_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype of the factors of `parameter`."""
        return self.factors or torch.promote_types(parameter.dtype, torch.float32)

    def solve_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype of the decompositions of `parameter`'s factors."""
        return self.solve or self.factor_dtype(parameter)
